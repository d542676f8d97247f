"""The scheduler's side of the vLLM connector, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import (
    STORED,
    WAIT_S,
    Block,
    Manager,
    answered,
    dims,
    empty_step,
    incoming,
    leave,
    request,
    rows,
    scheduler_side,
)

from tailreplay.connector.client import StoreClient
from tailreplay.connector.fetch_plan import ModelShape
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.connector.vllm_keep import Keeper
from tailreplay.connector.vllm_local import LocalStates
from tailreplay.connector.vllm_meta import KeepBegin, StepOps, WorkerNews
from tailreplay.connector.vllm_plan import Asked, Tracked, hit_plan
from tailreplay.connector.vllm_scheduler import SchedulerSide
from tailreplay.store import serve_in_thread
from tailreplay.store.tokens import extended_tokens


@pytest.mark.parametrize(("kv", "state", "used"), [(768, 512, 768), (512, 768, 512)])
def test_case_25_no_token_is_used_whose_keys_and_values_are_not_there(
    kv: int, state: int, used: int
):
    with serve_in_thread() as server:
        side = scheduler_side(server.address)
        asked = incoming(STORED)
        leave(server.address, side._lookups.namespaces.of(asked), kv, state)
        assert answered(side, asked) == (used, True)
        plan = side._tracked["r"].plan
        assert plan is not None
        assert plan.checkpoint_token <= used
        side.close()


def test_a_state_of_vllms_own_is_pinned_while_a_load_begins_with_it():
    manager = Manager(Block(0, None), Block(7, "state"))
    states = LocalStates(manager, (-1, 4))
    found = states.find(None, 8)
    assert found is not None
    assert found.block_ids == (-1, 7)
    assert states.hold("r", found)
    assert [b.block_id for b in manager.pinned] == [7]
    states.release("r")
    states.release("r")
    assert manager.pinned == []


def test_a_state_that_vllm_has_given_away_is_not_pinned():
    manager = Manager(Block(7, "state"))
    states = LocalStates(manager, (-1, 4))
    found = states.find(None, 4)
    assert found is not None
    manager.groups[1][0].block_hash = "another"
    assert not states.hold("r", found)
    assert manager.pinned == []
    assert len(states) == 0


def test_no_state_is_found_where_vllms_hit_ends_elsewhere_or_its_block_is_nobodys():
    assert LocalStates(Manager(Block(7, "state")), (-1, 4)).find(None, 8) is None
    assert LocalStates(Manager(Block(0, None)), (-1, 4)).find(None, 4) is None


@pytest.mark.parametrize(
    ("state", "media", "used"),
    [(0, 900, 700), (0, 200, 200), (100, 200, 200), (300, 200, 300), (700, 200, 700), (0, 0, 0)],
)
def test_no_gap_is_closed_over_a_medium_or_behind_one(state: int, media: int, used: int):
    checkpoints = (StoredCheckpoint(state, b"state"),) if state else ()
    stored = StoredPrefix(700, kv_tokens=700, checkpoints=checkpoints)
    asked: Future[Asked] = Future()
    asked.set_result(Asked(bytes(32), stored))
    place = SimpleNamespace(mm_position=SimpleNamespace(offset=media))
    seen = request(mm_features=[place])
    tokens = extended_tokens(STORED)
    plan = hit_plan(Tracked(seen, tokens, CachePolicy(), asked, 0, 0.0), ModelShape(2, 2, 0))
    assert plan.used_tokens == used
    assert plan.lost == ({"media": 700 - used} if used < 700 else {})


def test_a_prompt_whose_logits_are_all_wanted_is_not_read_but_stored():
    with serve_in_thread() as server:
        side = scheduler_side(server.address)
        asked = incoming(STORED)
        leave(server.address, side._lookups.namespaces.of(asked), 1000, 512)
        asked.skip_reading_prefix_cache = True
        assert answered(side, asked) == (0, False)
        assert side._tracked["r"].asked.result().reason is None
        assert side._worth.begin(side._tracked["r"]) is not None
        side.close()


def test_a_prompt_that_can_not_be_named_is_served_and_not_stored():
    with serve_in_thread() as server:
        side = scheduler_side(server.address)
        asked = incoming(STORED)
        asked.lora_request = object()  # without a folder
        assert answered(side, asked) == (0, False)
        assert side._worth.begin(side._tracked["r"]) is None
        side.close()


@pytest.fixture
def loading() -> Iterator[tuple[SchedulerSide, Any]]:
    """A scheduler's side of two ranks, and a request of which 600 tokens are being loaded."""
    ids = list(range(700))
    with serve_in_thread() as server:
        side = scheduler_side(server.address, ranks=2)
        asked = incoming(ids)
        namespace = side._lookups.namespaces.of(asked)
        with StoreClient(server.address) as client:
            keeper = Keeper(client, PayloadCodec(dims()), WAIT_S)
            keeper.begin("other", KeepBegin(namespace, extended_tokens(ids[:600]), 0, (), ()))
            keeper.add_rows("other", 0, rows(0, 600), None)
            keeper.put("other")
            keeper.close()
        assert answered(side, asked) == (600, True)
        side.allocated(asked, ([7], [1, 2, 3]), 600)
        assert [op.request_id for op in side.step(empty_step()).loads] == ["r"]
        yield side, asked
        side.close()


def test_all_ranks_fill_the_cache_in_the_step_after_the_last_has_its_bytes(loading: Any):
    side, _ = loading
    side.heard(WorkerNews({"r": 1}), set(), set())
    assert side.step(empty_step()).ready == []
    side.heard(WorkerNews({"r": 1}), set(), set())
    assert side.step(empty_step()).ready == ["r"]


def test_a_load_that_fails_on_one_rank_is_dropped_on_all_and_not_tried_again(loading: Any):
    side, asked = loading
    side.heard(WorkerNews({"r": 1}, {"r": 1}, {"r": "evicted"}), set(), set())
    step = side.step(empty_step())
    assert (step.ready, step.dropped) == ([], {"r": True})
    side.heard(None, {"r"}, {"r"})
    assert side.matched(asked, 0) == (0, False)


@pytest.mark.parametrize("ranks_done", [0, 1, 2])
def test_case_49_an_aborted_load_is_dropped_once_however_far_it_is(loading: Any, ranks_done: int):
    side, asked = loading
    side.heard(WorkerNews({"r": ranks_done}), set(), set())
    if ranks_done == 2:
        assert side.step(empty_step()).ready == ["r"]
    side.finished(asked, ())
    assert side.step(empty_step()).dropped == {"r": False}
    side.heard(WorkerNews({"r": 2 - ranks_done}), {"r"}, set())
    step = side.step(empty_step())
    assert (step.ready, step.dropped) == ([], {})
    assert_nothing_is_left(side)


def assert_nothing_is_left(side: SchedulerSide) -> None:
    assert not side._tracked
    assert not side._fetched
    assert not side._broken


@pytest.mark.parametrize("answers", [0, 1])
def test_case_49_a_request_aborted_before_its_load_leaves_nothing(tmp_path: Any, answers: int):
    side = scheduler_side(f"unix://{tmp_path}/nobody.sock", match_timeout_s=0.2)
    asked = incoming([1, 2, 3])
    side.on_new_request(asked)
    if answers:
        side._tracked["r"].asked.result()
        assert side.matched(asked, 0) == (0, False)
    side.finished(asked, ())
    assert side.step(empty_step()) == StepOps(idle=True)
    assert_nothing_is_left(side)
    side.close()


def test_case_49_a_load_that_has_been_reported_is_not_dropped_by_a_later_abort(loading: Any):
    side, asked = loading
    side.heard(WorkerNews({"r": 2}), set(), set())
    side.step(empty_step())
    side.heard(None, {"r"}, set())
    side.finished(asked, ())
    assert side.step(empty_step()).dropped == {}
    assert_nothing_is_left(side)


def test_a_lookup_is_waited_for_no_longer_than_its_deadline(tmp_path: Any):
    now = 0.0
    address = f"unix://{tmp_path}/nobody.sock"
    side = scheduler_side(address, clock=lambda: now, match_timeout_s=20)
    asked = incoming([1, 2, 3])
    assert side.matched(asked, 0) == (None, False)
    now = 21.0
    assert side.matched(asked, 0) == (0, False)
    side._lookups._client.close()
    side.close()


def test_while_others_run_a_store_that_has_answered_is_waited_for_longer(tmp_path: Any):
    now = 0.0
    waiting, running = empty_step(), empty_step()
    running.total_num_scheduled_tokens = 1
    address = f"unix://{tmp_path}/nobody.sock"
    side = scheduler_side(address, clock=lambda: now, match_timeout_s=20, match_grace_s=20)
    side._lookups._answers = True
    slow, late = (incoming([4, 5, 6]) for _ in range(2))
    slow.request_id, late.request_id = "slow", "late"
    for asked in (slow, late):
        assert side.matched(asked, 0) == (None, False)
    now = 21.0
    side.step(running)
    assert side.matched(slow, 0) == (None, False)
    side.step(waiting)
    assert side.matched(slow, 0) == (0, False)
    # The one that was given up is run now, and the other need not be yet.
    side.allocated(slow, ([1], [2]), 0)
    assert side.matched(late, 0) == (None, False)
    now = 41.0
    side.step(running)
    assert side.matched(late, 0) == (0, False)
    side._lookups._client.close()
    side.close()


def test_a_store_that_has_not_answered_is_waited_for_no_longer_whoever_runs(tmp_path: Any):
    now = 0.0
    address = f"unix://{tmp_path}/nobody.sock"
    side = scheduler_side(address, clock=lambda: now, match_timeout_s=20, match_grace_s=20)
    asked = incoming([1, 2, 3])
    assert side.matched(asked, 0) == (None, False)
    now = 21.0
    running = empty_step()
    running.total_num_scheduled_tokens = 1
    side.step(running)
    assert side.matched(asked, 0) == (0, False)
    side._lookups._client.close()
    side.close()
