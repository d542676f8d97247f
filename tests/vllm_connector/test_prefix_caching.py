"""Hits beside vLLM's own prefix caching, and what is counted of both."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_prompts import branch, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

HIT_TOKENS = (65, 256, 257, 777, 1234)


@pytest.mark.parametrize("m", HIT_TOKENS)
def test_with_prefix_caching_states_are_within_the_engines_own_noise(chunked: Any, m: int):
    prompt = tokens(1400, seed=11)
    chunked.generate(prompts=[prompt], cache_salt="apc")
    found = chunked.compare(
        prompt=branch(prompt, m),
        cuts=[*range(512, m, 512), m],
        noise_cuts=[65, m] if m > 65 else [m],
        salts=["apc", f"a{m}", f"b{m}"],
    )
    assert found["cached"] == m
    assert found["state_error"] <= 1.5 * found["noise"]


def test_case_32_a_local_hit_is_completed_from_the_store(chunked: Any):
    prompt = tokens(1400, seed=12)
    asked = branch(prompt, 799)
    cold = chunked.generate(prompts=[asked], mode="off", cache_salt="cold")
    noise = worst([chunked.cut(prompt=asked, cuts=[512, 799])], cold)
    chunked.generate(prompts=[prompt[:790]])
    chunked.generate(prompts=[prompt])
    found = chunked.generate(prompts=[asked])
    assert (found[0]["cached"], found[0]["report"]["local_tokens"]) == (799, 768)
    assert found[0]["report"]["checkpoint_token"] == 790
    assert worst(found, cold) <= 2 * noise


def test_case_32_a_gap_begins_at_the_state_that_vllm_has_itself(chunked: Any):
    prompt = tokens(1400, seed=26)
    chunked.generate(prompts=[prompt], cache_salt="own")
    found = chunked.compare(
        prompt=branch(prompt, 1350, 50),
        cuts=[512, 1024, 1280, 1350],
        noise_cuts=[65, 1350],
        salts=["own", "a", "b"],
    )
    assert (found["cached"], found["report"]["local_tokens"]) == (1350, 1280)
    # What is stored is farther behind: a state at 1024.
    assert found["report"]["checkpoint_token"] == 1280
    assert found["state_error"] == 0
    # The state at the boundary has been stored, so the next one there has no gap.
    again = chunked.generate(prompts=[branch(prompt, 1350, 50, turn=2)], cache_salt="own")[0]
    assert (again["cached"], again["report"]["recomputed_tokens"]) == (1350, 0)
    assert chunked.held_states() == 0


def counted(engine: Any) -> dict[str, float]:
    """vLLM's counters, and ours."""
    ours = ("queried_tokens", "loaded_tokens", "matched_tokens", "used_tokens", "lost_tokens")
    names = {name: f"vllm:tailreplay_{name}" for name in (*ours, "loads", "failed_loads")}
    for name in ("queries", "hits"):
        names[name] = f"vllm:external_prefix_cache_{name}"
    return {key: engine.metric(name=name) for key, name in names.items()}


def assert_counts_agree(more: dict[str, float]) -> None:
    assert more["queried_tokens"] == more["queries"]
    assert more["loaded_tokens"] == more["hits"]
    assert more["matched_tokens"] == more["used_tokens"] + more["lost_tokens"]


def test_case_79_vllm_counts_what_we_count(eager: Any):
    prompt = tokens(1000, seed=5)
    before = counted(eager)
    eager.generate(prompts=[prompt])
    eager.generate(prompts=[branch(prompt, 333)])
    more = {name: value - before[name] for name, value in counted(eager).items()}
    assert more["queries"] == 1000 + 433
    assert more["hits"] == 333
    assert (more["loads"], more["failed_loads"]) == (1, 0)
    assert_counts_agree(more)


def test_case_79_local_hits_are_in_no_external_count(chunked: Any):
    prompt = tokens(1400, seed=22)
    chunked.generate(prompts=[prompt])
    chunked.generate(prompts=[branch(prompt, 700)])
    before = counted(chunked)
    found = chunked.generate(prompts=[branch(prompt, 700)])[0]
    more = {name: value - before[name] for name, value in counted(chunked).items()}
    local = found["report"]["local_tokens"]
    assert local == 768
    assert more["queries"] == 800 - local
    assert more["hits"] == found["cached"] - local == 799 - 768
    assert_counts_agree(more)
