"""The GPU tier in real vLLM engines, here in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import Engine
from vllm_models import qwen35
from vllm_prompts import branch, tokens, worst

from tailreplay.store import serve_in_thread

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
LOADED = "vllm:tailreplay_loaded_bytes"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    engines = []
    folder = tmp_path_factory.mktemp("engines")
    model: Path = qwen35(folder / "model")
    with serve_in_thread(pool_bytes=256 * MIB) as store:

        def begin(pool_bytes: int = 64 * MIB, **arguments: Any) -> Engine:
            # Hiddens are stored, so that a request may have a tail.
            connector = {"device_pool_bytes": pool_bytes, "store_hiddens": True}
            engines.append(Engine(model, store.address, folder, connector=connector, **arguments))
            return engines[-1]

        yield begin
        for engine in engines:
            engine.close()


@pytest.fixture(scope="module")
def tiered(start: Callable[..., Any]) -> Any:
    return start()


@pytest.fixture(scope="module")
def plain(start: Callable[..., Any]) -> Any:
    return start(pool_bytes=0)


def sizes(found: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind out of the pool, and out of the store."""
    loaded = found["report"]["bytes"]
    return loaded.get("gpu", {}), loaded.get("cpu", {})


def second_hit(engine: Any, prompt: list[int], m: int, salt: str) -> dict[str, Any]:
    """The second prompt that leaves a stored one at m; the first has left the state there."""
    engine.generate(prompts=[prompt], cache_salt=salt)
    engine.generate(prompts=[branch(prompt, m)], cache_salt=salt)
    found: dict[str, Any] = engine.generate(prompts=[branch(prompt, m, turn=2)], cache_salt=salt)[0]
    assert (found["cached"], found["report"]["checkpoint_token"]) == (m, m)
    return found


def test_a_second_hit_loads_next_to_nothing_and_answers_the_same(tiered: Any, plain: Any):
    prompt = tokens(1400, seed=1)
    there = second_hit(plain, prompt, 777, "there")
    here = second_hit(tiered, prompt, 777, "here")
    assert worst([here], [there]) == 0
    (pool, store), (none, whole) = sizes(here), sizes(there)
    assert none == {}
    assert {kind: pool[kind] + store.get(kind, 0) for kind in pool} == whole
    # The page in which the prompt leaves what is stored is the one thing that is loaded.
    assert store == {"kv": whole["kv"] * (777 % 64) // 777}
    before = tiered.metric(name=LOADED, tier="gpu")
    again = tiered.generate(prompts=[branch(prompt, 777, turn=3)], cache_salt="here")[0]
    assert tiered.metric(name=LOADED, tier="gpu") - before == sum(sizes(again)[0].values()) > 0
    assert plain.metric(name=LOADED, tier="gpu") == 0
    assert tiered.left_over() == 0


def test_a_hit_out_of_the_pool_is_bit_equal_to_a_prefill_cut_there(tiered: Any):
    prompt = tokens(1400, seed=2)
    tiered.generate(prompts=[prompt], cache_salt="cut")
    found = tiered.compare(
        prompt=branch(prompt, 1234), cuts=[1234], noise_cuts=[1234], salts=["cut", "a", "b"]
    )
    assert found["cached"] == 1234
    assert found["state_error"] == 0
    assert found["tokens_equal"]


def test_a_salt_finds_nothing_of_another_in_the_pool(tiered: Any):
    prompt = tokens(700, seed=3)
    one = second_hit(tiered, prompt, 600, "one")
    assert sizes(one)[0].keys() == {"kv", "checkpoint"}
    other = tiered.generate(prompts=[branch(prompt, 600, turn=3)], cache_salt="two")[0]
    assert (other["cached"], other["report"]["bytes"]) == (0, {})


def test_what_is_approximate_does_not_get_in(tiered: Any):
    prompt = tokens(1400, seed=4)
    tiered.generate(prompts=[prompt])
    before = tiered.pool_bytes()
    found = tiered.generate(prompts=[branch(prompt, 640)], mode="zero")[0]
    assert found["report"]["mode"] == "zero"
    assert tiered.pool_bytes() == before


def test_a_pool_of_a_megabyte_holds_no_more_and_serves_what_it_has(
    start: Callable[..., Any], plain: Any
):
    small = start(pool_bytes=MIB)
    prompt = tokens(1400, seed=5)
    second_hit(small, prompt, 700, "another")
    here = second_hit(small, prompt, 900, "small")
    assert worst([here], [second_hit(plain, prompt, 900, "large")]) == 0
    assert small.pool_bytes() <= MIB
    pool, store = sizes(here)
    assert 0 < sum(pool.values()) <= MIB
    assert sum(store.values()) > 0
    assert small.left_over() == 0


def test_a_chat_with_prefix_caching_takes_its_states_out_of_the_pool(start: Callable[..., Any]):
    caching = start(enable_prefix_caching=True, max_num_batched_tokens=512)
    prompt = tokens(400, seed=6)
    for turn in range(4):
        found = caching.generate(prompts=[prompt], tokens=70)[0]
        if turn:
            pool, store = sizes(found)
            assert "checkpoint" in pool
            assert "checkpoint" not in store
        prompt = prompt + found["tokens"] + tokens(30, seed=100 + turn)
    assert caching.left_over() == 0


def test_tails_of_hiddens_come_out_of_the_pool(tiered: Any):
    prompt = tokens(1400, seed=7)
    tiered.generate(prompts=[prompt])
    asked = [[branch(prompt, 1280, turn=turn)] for turn in (1, 2)]
    found = [tiered.generate(prompts=one, mode="tail")[0] for one in asked]
    for one in found:
        assert one["report"]["mode"] == "tail"
        pool, store = sizes(one)
        assert pool["hidden"] > 0
        assert store == {}
    plain = tiered.generate(prompts=asked[1], mode="off")
    zeros = tiered.generate(prompts=asked[1], mode="zero")
    assert worst(found[1:], plain) < worst(zeros, plain)


def test_each_rank_has_a_pool_of_its_own_heads(start: Callable[..., Any], plain: Any):
    split = start(tensor_parallel_size=2)
    prompt = tokens(1000, seed=8)
    here = second_hit(split, prompt, 777, "split")
    there = second_hit(plain, prompt, 777, "whole")
    assert worst([here], [there]) < 0.3
    (pool, store), (_, whole) = sizes(here), sizes(there)
    assert store == {"kv": whole["kv"] * (777 % 64) // 777}
    assert {kind: pool[kind] + store.get(kind, 0) for kind in pool} == whole
