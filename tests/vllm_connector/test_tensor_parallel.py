"""An engine of two ranks, beside one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_prompts import branch, second_hit, sizes, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def split(start_shared: Callable[..., Any]) -> Any:
    """With a GPU tier on each rank."""
    return start_shared(tensor_parallel_size=2, connector={"device_pool_bytes": 64 << 20})


def test_engines_of_any_tensor_parallel_size_share(split: Any, eager: Any):
    ours, theirs = tokens(1000, seed=15), tokens(1000, seed=16)
    eager.generate(prompts=[ours])
    split.generate(prompts=[theirs])
    for engine, other, prompt in ((split, eager, ours), (eager, split, theirs)):
        asked = branch(prompt, 777)
        plain = engine.generate(prompts=[asked], mode="off")[0]
        hits = [engine.generate(prompts=[asked])[0] for _ in range(2)]
        assert [hit["cached"] for hit in hits] == [777, 876], [hit["report"] for hit in hits]
        assert worst(hits, [plain, plain]) < 0.3
        # A state, too, that the other has left.
        other.generate(prompts=[branch(prompt, 500)])
        asked = branch(prompt, 500, turn=2)
        plain = engine.generate(prompts=[asked], mode="off")[0]
        hit = engine.generate(prompts=[asked])[0]
        assert (hit["cached"], hit["report"]["checkpoint_token"]) == (500, 500)
        assert sizes(hit)[1]["checkpoint"] > 0
        assert worst([hit], [plain]) < 0.3


def test_each_rank_has_a_pool_of_its_own_heads(split: Any, eager: Any):
    prompt = tokens(1000, seed=208)
    here = second_hit(split, prompt, 777, "split")
    there = second_hit(eager, prompt, 777, "whole")
    assert worst([here], [there]) < 0.3
    (pool, store), (_, whole) = sizes(here), sizes(there)
    assert store == {"kv": whole["kv"] * (777 % 64) // 777}
    assert {kind: pool[kind] + store.get(kind, 0) for kind in pool} == whole
