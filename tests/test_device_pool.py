"""The GPU tier, here in the CPU's memory: never other rows, and what is used last stays."""

import pytest
import torch
from case_helpers import (
    STORE,
    ask,
    assert_reused,
    assert_right,
    drop,
    fork,
    policy,
    prompt,
    replica,
    tier_bytes,
)

from tailreplay.connector.device_pool import DevicePool
from tailreplay.connector.device_rows import SLOT_BYTES
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind, ObjectName

MIB = 1 << 20
WITH_POOL = policy(device_pool_bytes=64 * MIB)


ROW_BYTES = SLOT_BYTES // 4
SHAPE = (2, 2, ROW_BYTES)  # an object of one slot


def named(number, kind=Kind.KV):
    return ObjectName(bytes(32), kind, bytes([number]) * 32)


def pages(numbers, shape=SHAPE):
    values = torch.tensor(list(numbers), dtype=torch.uint8)
    return values.view(-1, 1, 1, 1).expand(-1, *shape)


def put(pool, *numbers, before=(), shape=SHAPE):
    names = [named(number) for number in numbers]
    made = []

    def make(lacking):
        made.extend(numbers[n] for n in lacking)
        return pages([numbers[n] for n in lacking], shape)

    pool.put(names, shape, make, before=[named(number) for number in before])
    return made


def there(pool, *numbers):
    return [number for number in numbers if named(number) in pool]


@pytest.fixture
def pool():
    memory = torch.full((10 * SLOT_BYTES + 7,), 255, dtype=torch.uint8)
    return DevicePool(memory)


def test_the_least_recently_used_goes_first_and_the_memory_is_never_more(pool):
    for number in range(10):
        put(pool, number)
    pool.hold([named(0)]).release()
    put(pool, 10)
    put(pool, 11)
    assert there(pool, *range(12)) == [0, *range(3, 12)]
    assert pool.used_bytes == 10 * SLOT_BYTES


def test_what_is_larger_than_the_pool_is_not_even_made(pool):
    assert put(pool, 1, shape=(2, 22, ROW_BYTES)) == []
    assert pool.used_bytes == 0


def test_what_is_there_is_not_made_again_and_counts_as_used(pool):
    for number in range(10):
        put(pool, number)
    assert put(pool, 0) == []
    put(pool, 10)
    assert there(pool, 0, 1) == [0]


def test_of_what_comes_together_the_first_come_in_and_go_last(pool):
    assert put(pool, *range(12)) == list(range(10))
    put(pool, 20, 21)
    assert there(pool, *range(12)) == list(range(8))


def test_what_lies_before_does_not_go_for_what_follows(pool):
    put(pool, 1, 2, 3)
    put(pool, 9)
    assert put(pool, *range(11, 21), before=(1, 2, 3)) == list(range(11, 18))
    assert there(pool, 1, 2, 3, 9) == [1, 2, 3]
    put(pool, 30)  # the last of those that follow goes, not what lies before
    assert there(pool, 1, 2, 3, 16, 17) == [1, 2, 3, 16]


def test_kinds_and_namespaces_of_one_prefix_differ(pool):
    put(pool, 1)
    assert pool.hold([named(1, Kind.HIDDEN)]) is None
    assert pool.hold([ObjectName(bytes([1]) * 32, Kind.KV, bytes([1]) * 32)]) is None


def test_what_is_held_stays_until_it_is_released(pool):
    put(pool, 7)
    held = pool.hold([named(7), named(8)])
    put(pool, *range(10, 20))
    assert len(held) == 2
    assert torch.equal(held.rows(slice(0, 2), 0, 2), pages([7])[0])
    held.release()
    held.release()
    put(pool, *range(20, 30))
    assert named(7) not in pool


def test_where_all_is_held_nothing_comes_in(pool):
    put(pool, *range(10))
    held = pool.hold([named(number) for number in range(10)])
    assert put(pool, 10) == []
    held.release()
    assert put(pool, 10) == [10]


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 4, 1000), (2, 64, 7000), (5, 64, 512)])
def test_rows_of_any_shape_come_out_as_they_went_in(shape):
    memory = torch.full((400 * SLOT_BYTES,), 255, dtype=torch.uint8)
    pool, count = DevicePool(memory), 3
    data = torch.randint(0, 255, (count, *shape), dtype=torch.uint8)
    names = [named(number) for number in range(count)]
    put(pool, 77)  # so that slots do not begin at the first
    pool.put(names, shape, lambda lacking: data[lacking])
    held = pool.hold(names)
    whole = data.transpose(0, 1).flatten(1, 2)
    units, rows = shape[0], count * shape[1]
    assert len(held) == rows
    spans = [(0, rows), (rows - 1, rows), (0, 1), (rows // 3, rows - rows // 4)]
    for first, end in spans:
        for part in (slice(0, units), slice(units - 1, units), slice(units // 2, units)):
            assert torch.equal(held.rows(part, first, end), whole[part, first:end])


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(**STORE) as server:
        yield server


@pytest.mark.model
@pytest.mark.parametrize("shared", [1400, 613, 63])
@pytest.mark.parametrize("mode", ["exact", "tail"])
def test_a_hit_out_of_the_pool_is_right_and_loads_the_rest_alone(server, request, shared, mode):
    tokens = prompt(1500)
    name = request.node.nodeid
    with (
        replica(server.address, tenant=name, policy=WITH_POOL) as engine,
        replica(server.address, tenant=f"{name}, without") as other,
    ):
        ask(engine, tokens)
        ask(other, tokens)
        second = fork(tokens, shared)
        asked = policy(mode, device_pool_bytes=64 * MIB)
        out = engine.generate(second, 1, policy=asked)
        plain = other.generate(second, 1, policy=asked)
        assert_reused(out.report, plain.report["matched_tokens"])
        assert torch.allclose(out.first_logits, plain.first_logits, rtol=1e-4, atol=1e-5)
        if mode == "exact":
            assert_right(out, second)
        here, there = out.report["bytes"], plain.report["bytes"].get("cpu", {})
        assert "gpu" not in plain.report["bytes"]
        from_store = here.get("cpu", {})
        for kind, size in there.items():
            assert here.get("gpu", {}).get(kind, 0) + from_store.get(kind, 0) == size
        if "kv" in there:  # of keys and values no whole page of the prompt is loaded
            assert from_store.get("kv", 0) <= there["kv"] * (shared % 64) / shared


@pytest.mark.model
def test_the_same_prompt_again_is_looked_up_and_not_loaded(
    server,
):
    tokens = prompt(1025)
    with replica(server.address, tenant="again", policy=WITH_POOL) as engine:
        ask(engine, tokens)
        out = ask(engine, tokens)
        assert_reused(out.report, 1024)
        assert out.report["rpcs"] == 1  # the lookup
        assert set(out.report["bytes"]) == {"gpu"}
        assert_right(out, tokens)


@pytest.mark.model
def test_tenants_and_engines_share_no_pool(server):
    tokens = prompt(700)
    with (
        replica(server.address, tenant="one", policy=WITH_POOL) as one,
        replica(server.address, tenant="two", policy=WITH_POOL) as two,
    ):
        ask(one, tokens)
        out = ask(two, tokens)
        assert (out.report["matched_tokens"], out.report["bytes"]) == (0, {})


@pytest.mark.model
def test_what_is_approximate_does_not_get_in(server):
    tokens = prompt(900)
    with replica(server.address, tenant="approximate", policy=WITH_POOL) as engine:
        ask(engine, tokens)
        drop(server, engine, tokens, Kind.CHECKPOINT, from_token=0)
        before = engine._device_pool.used_bytes
        out = ask(engine, fork(tokens, 613), policy=policy("tail"))
        assert out.report["mode"] == "tail"
        assert engine._device_pool.used_bytes == before


@pytest.mark.model
def test_a_pool_that_is_too_small_holds_the_beginning(server):
    tokens = prompt(1025)
    small = policy(device_pool_bytes=1 * MIB)
    with replica(server.address, tenant="small", policy=small) as engine:
        ask(engine, tokens)
        assert engine._device_pool.used_bytes <= MIB
        out = ask(engine, tokens)
        assert_right(out, tokens)
        assert_reused(out.report, 1024)
        assert out.report["bytes"]["gpu"]["kv"] > 0
        assert tier_bytes(server)


@pytest.mark.gpu
@pytest.mark.model
def test_on_a_gpu_rows_stay_there(server):
    from tiny_models import tiny_qwen

    tokens = prompt(1025)
    with replica(server.address, tiny_qwen().cuda(), tenant="gpu", policy=WITH_POOL) as engine:
        ask(engine, tokens)
        out = ask(engine, tokens)
        assert set(out.report["bytes"]) == {"gpu"}
        assert engine._device_pool.device.type == "cuda"
