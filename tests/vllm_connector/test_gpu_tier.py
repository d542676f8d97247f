"""The GPU tier in real vLLM engines, here in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_prompts import branch, second_hit, sizes, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
LOADED = "vllm:tailreplay_loaded_bytes"

TIERED = {"device_pool_bytes": 64 * MIB, "store_hiddens": True}
"""Hiddens are stored, so that a request may have a tail."""


@pytest.fixture(scope="module")
def tiered(start_shared: Callable[..., Any]) -> Any:
    return start_shared(connector=TIERED)


def test_a_second_hit_loads_next_to_nothing_and_answers_the_same(tiered: Any, eager: Any):
    prompt = tokens(1400, seed=201)
    there = second_hit(eager, prompt, 777, "there")
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
    assert eager.metric(name=LOADED, tier="gpu") == 0
    assert tiered.left_over() == 0


def test_a_hit_out_of_the_pool_is_bit_equal_to_a_prefill_cut_there(tiered: Any):
    prompt = tokens(1400, seed=202)
    tiered.generate(prompts=[prompt], cache_salt="cut")
    found = tiered.compare(
        prompt=branch(prompt, 1234), cuts=[1234], noise_cuts=[1234], salts=["cut", "a", "b"]
    )
    assert found["cached"] == 1234
    assert found["state_error"] == 0
    assert found["tokens_equal"]


def test_a_salt_finds_nothing_of_another_in_the_pool(tiered: Any):
    prompt = tokens(700, seed=203)
    one = second_hit(tiered, prompt, 600, "one")
    assert sizes(one)[0].keys() == {"kv", "checkpoint"}
    other = tiered.generate(prompts=[branch(prompt, 600, turn=3)], cache_salt="two")[0]
    assert (other["cached"], other["report"]["bytes"]) == (0, {})


def test_what_is_approximate_does_not_get_in(tiered: Any):
    prompt = tokens(1400, seed=204)
    tiered.generate(prompts=[prompt])
    before = tiered.pool_bytes()
    found = tiered.generate(prompts=[branch(prompt, 640)], mode="zero")[0]
    assert found["report"]["mode"] == "zero"
    assert tiered.pool_bytes() == before


def test_a_pool_of_a_megabyte_holds_no_more_and_serves_what_it_has(
    start: Callable[..., Any], eager: Any
):
    small = start(connector=TIERED | {"device_pool_bytes": MIB})
    prompt = tokens(1400, seed=205)
    second_hit(small, prompt, 700, "another")
    here = second_hit(small, prompt, 900, "small")
    assert worst([here], [second_hit(eager, prompt, 900, "large")]) == 0
    assert small.pool_bytes() <= MIB
    pool, store = sizes(here)
    assert 0 < sum(pool.values()) <= MIB
    assert sum(store.values()) > 0
    assert small.left_over() == 0


def test_a_chat_with_prefix_caching_takes_its_states_out_of_the_pool(start: Callable[..., Any]):
    caching = start(connector=TIERED, enable_prefix_caching=True, max_num_batched_tokens=512)
    prompt = tokens(400, seed=206)
    for turn in range(4):
        found = caching.generate(prompts=[prompt], tokens=70)[0]
        if turn:
            pool, store = sizes(found)
            assert "checkpoint" in pool
            assert "checkpoint" not in store
        prompt = prompt + found["tokens"] + tokens(30, seed=300 + turn)
    assert caching.left_over() == 0


def test_tails_of_hiddens_come_out_of_the_pool(tiered: Any):
    prompt = tokens(1400, seed=207)
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
