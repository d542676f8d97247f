"""Tails in real engines: of hiddens, and of keys and values alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_prompts import branch, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_tail_is_replayed_and_leaves_nothing_behind(start: Callable[..., Any], store: Any):
    engine = start(connector={"mode": "tail", "replay_ratio": 0.5})
    prompt = tokens(1400, seed=17)
    engine.generate(prompts=[prompt])
    prompts = [branch(prompt, m) for m in (257, 777, 1234)]
    plain = engine.generate(prompts=prompts, mode="off")
    stored_bytes = store.store.stats().stored_bytes
    zeros = engine.generate(prompts=prompts, mode="zero")
    tails = engine.generate(prompts=prompts)
    assert [t["cached"] for t in tails] == [257, 777, 1234]
    assert [t["report"]["replayed_tokens"] for t in tails] == [129 + 3, 389 + 3, 617 + 3]
    assert {t["report"]["mode"] for t in tails} == {"tail"}
    assert worst(tails, plain) < worst(zeros, plain) / 2
    assert store.store.stats().stored_bytes == stored_bytes


def test_a_tail_without_hiddens_runs_over_its_own_keys_and_values(eager: Any):
    prompt = tokens(1400, seed=18)
    eager.generate(prompts=[prompt])
    branched = [branch(prompt, 130)]
    plain, zero, tail = (
        eager.generate(prompts=branched, mode=mode) for mode in ("off", "zero", "tail")
    )
    assert tail[0]["report"]["replayed_tokens"] == 64 + 3
    assert worst(tail, plain) < worst(zero, plain)
