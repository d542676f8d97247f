"""The GPU tier of the vLLM connector; where no engine is needed, in the CPU's memory."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from vllm_fakes import WAIT_S, dims, leave, rows

from tailreplay.connector.client import StoreClient
from tailreplay.connector.device_pool import DevicePool
from tailreplay.connector.fetch_plan import FetchPlan
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.stored import StoredCheckpoint
from tailreplay.connector.vllm_load import RankLoad
from tailreplay.connector.vllm_meta import LoadOp
from tailreplay.connector.vllm_pool import RankPool
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.chain import PrefixChain
from tailreplay.store.tokens import extended_tokens

IDS = list(range(1000))
NAMESPACE = bytes(32)


def rank_pool(*, computed_kv: bool = True, size: int = 4 << 20) -> RankPool:
    return RankPool(
        DevicePool(torch.full((size,), 255, dtype=torch.uint8)), computed_kv=computed_kv
    )


def tokens(ids: list[int] = IDS) -> Any:
    return extended_tokens(ids)


def load_of(
    pool: RankPool | None,
    plan: FetchPlan,
    *,
    ids: list[int] = IDS,
    namespace: bytes = NAMESPACE,
    ranks: int = 1,
    rank: int = 0,
    leaf: bytes = b"leaf",
) -> RankLoad:
    op = LoadOp("r", namespace, leaf, tokens(ids), plan, 0, ((1,),), None, None, None)
    own = None if pool is None else pool.pool
    return RankLoad(op, dims(), dims(ranks), rank * 2 // ranks, rank, own)


def kv_left(load: RankLoad) -> list[tuple[int, int]]:
    return [(r.first_token, r.end_token) for r in load.left if r.kind == pb.KIND_KV]


def kv_of(load: RankLoad, number: int, first: int, end: int) -> torch.Tensor:
    """Positions that the rows of a layer say, `[heads, rows]`."""
    found = load.rows(load.kv_numbers[number], first, end).contiguous().view(torch.bfloat16)
    return found[:, :, 0]


HIT = FetchPlan("exact", True, 900, 900, 900, None)


@pytest.mark.parametrize("steps", [[1000], [512, 488], [100, 30, 300, 570], [63, 1, 936]])
def test_rows_of_any_steps_become_pages_that_need_not_be_loaded(steps: list[int]):
    pool = rank_pool()
    pool.begin("r", NAMESPACE, tokens())
    at = 0
    for count in steps:
        pool.add_kv("r", at, rows(at, at + count))
        at += count
    load = load_of(pool, HIT)
    assert kv_left(load) == []
    for number in range(2):
        said = kv_of(load, number, 100, 890)
        assert torch.equal(said, rows(100, 890)[0, 0, :, :, 0].T)
    assert load.bytes_by_tier() == {"gpu": {"kv": 900 * 2 * 2 * 2 * 4 * 2}}
    pool.forget("r")
    assert not pool._open


def test_of_a_page_with_a_hole_nothing_is_made():
    pool = rank_pool()
    pool.begin("r", NAMESPACE, tokens())
    pool.add_kv("r", 0, rows(0, 100))
    pool.add_kv("r", 101, rows(101, 1000))
    assert kv_left(load_of(pool, HIT)) == [(64, 900)] * 2


def test_another_prompt_or_tenant_finds_only_what_it_shares():
    pool = rank_pool()
    pool.begin("r", NAMESPACE, tokens())
    pool.add_kv("r", 0, rows(0, 1000))
    pool.add_state("r", 900, torch.zeros(12, 1, 40, dtype=torch.uint8))
    state = StoredCheckpoint(900, PrefixChain(NAMESPACE, tokens()).prefix_hash(900))
    plan = FetchPlan("exact", True, 900, 900, 900, state)
    assert load_of(pool, plan).left == []
    assert len(load_of(pool, plan, namespace=bytes([1]) * 32).left) == 3
    assert kv_left(load_of(pool, plan, ids=[*IDS[:700], 4711, *IDS[701:]])) == [(640, 900)] * 2
    assert kv_left(load_of(pool, plan, ids=[4711, *IDS[1:]])) == [(0, 900)] * 2


def test_with_prefix_caching_only_what_had_to_be_loaded_is_kept():
    pool = rank_pool(computed_kv=False)
    pool.begin("r", NAMESPACE, tokens())
    pool.add_kv("r", 0, rows(0, 1000))
    assert kv_left(load_of(pool, HIT)) == [(0, 900)] * 2


def test_of_hiddens_those_near_the_end_are_kept():
    pool = rank_pool()
    long = list(range(4000))
    pool.begin("r", NAMESPACE, tokens(long))
    for first in (0, 1500, 3000):
        count = min(1500, 4000 - first)
        pool.add_hidden("r", first, torch.zeros(1, count, 8, dtype=torch.bfloat16))
    for tail, left in ((3000, []), (1984, []), (1900, [(1900, 3900)])):
        plan = FetchPlan("tail", False, 3900, 3900, 3900, None, tail)
        load = load_of(pool, plan, ids=long)
        spans = [(r.first_token, r.end_token) for r in load.left if r.kind == pb.KIND_HIDDEN]
        assert spans == left


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_what_was_loaded_once_is_not_loaded_again(ranks: int, rank: int):
    """Each rank keeps its own heads; what comes out of the pool is what came from the store."""
    with serve_in_thread() as server, StoreClient(server.address) as client:
        leave(server.address, NAMESPACE, 1000, 512)
        answer = client.match(NAMESPACE, tokens(), timeout_s=WAIT_S)
        state = StoredCheckpoint(512, PrefixChain(NAMESPACE, tokens()).prefix_hash(512))
        plan = FetchPlan("exact", True, 900, 900, 900, state)
        pool = rank_pool()
        came = {}
        for turn in ("store", "pool", "again"):
            load = load_of(
                None if turn == "store" else pool, plan, ranks=ranks, rank=rank, leaf=answer.leaf
            )
            over: queue.Queue[str | None] = queue.Queue()
            load.start(
                client,
                PayloadCodec(dims()).geometry,
                WAIT_S,
                lambda _, reason, over=over: over.put(reason),
            )
            assert over.get(timeout=20) is None
            pool.add_load(load)
            came[turn] = [load.rows(number) for number in range(len(load.ranges))]
            sizes = load.bytes_by_tier()
            load.release()
        assert all(torch.equal(a, b) for a, b in zip(came["store"], came["pool"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(came["store"], came["again"], strict=True))
        # Of the last page the prompt has but a part; only that is loaded again.
        assert kv_left(load) == [(896, 900)] * 2
        assert set(sizes["cpu"]) == {"kv"}
        assert set(sizes["gpu"]) == {"kv", "checkpoint"}


def test_a_dropped_load_holds_nothing_in_the_pool():
    pool = rank_pool(size=16 << 14)
    pool.begin("r", NAMESPACE, tokens())
    pool.add_kv("r", 0, rows(0, 1000))
    load = load_of(pool, HIT)
    other = [*range(5000, 6000)]
    pool.begin("s", NAMESPACE, tokens(other))

    def left_once_put() -> list[tuple[int, int]]:
        """What a load of the other prompt lacks, when it has been put."""
        pool.add_kv("s", 0, rows(0, 1000))
        another = load_of(pool, HIT, ids=other)
        another.cancel()
        return kv_left(another)

    assert left_once_put() == [(64, 900)] * 2  # what is held has left room for one page
    load.cancel()
    assert left_once_put() == []
