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
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

MIB = 1 << 20
WITH_POOL = policy(device_pool_bytes=64 * MIB)


def page(value, size=100):
    return torch.full((1, 1, size), value, dtype=torch.uint8)


def put(pool, number, size=100):
    name = pool.name(Kind.KV, bytes([number]) * 32)
    pool.put(name, size, lambda: page(number, size))
    return name


@pytest.fixture
def pool():
    return DevicePool(1000, torch.device("cpu"), bytes(32))


def test_the_least_recently_used_goes_first_and_the_budget_holds(pool):
    names = [put(pool, number) for number in range(10)]
    assert pool.get(names[0]) is not None
    put(pool, 10)
    put(pool, 11)
    assert [pool.get(name) is not None for name in names] == [True, False, False] + [True] * 7
    assert pool.used_bytes == 1000


def test_what_is_larger_than_the_pool_is_not_even_made(pool):
    pool.put(pool.name(Kind.KV, bytes(32)), 1001, lambda: pytest.fail("made"))
    assert pool.used_bytes == 0


def test_what_is_there_is_not_made_again_and_counts_as_used(pool):
    names = [put(pool, number) for number in range(10)]
    pool.put(names[0], 100, lambda: pytest.fail("made again"))
    put(pool, 10)
    assert pool.get(names[0]) is not None
    assert pool.get(names[1]) is None


def test_kinds_of_one_prefix_differ(pool):
    put(pool, 1)
    assert pool.get(pool.name(Kind.HIDDEN, bytes([1]) * 32)) is None


def test_what_was_handed_out_stays_good(pool):
    name = put(pool, 7)
    held = pool.get(name)
    for number in range(10, 20):
        put(pool, number)
    assert pool.get(name) is None
    assert torch.equal(held, page(7))


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
        assert all(rows.is_cuda for rows in engine._device_pool._objects.values())
