"""vllm#54607: a system prompt of 240 tokens hit nothing, and metrics did not say why."""

import pytest
from case_helpers import ask, assert_reused, assert_right, fork, policy, prompt, since

pytestmark = pytest.mark.model


def test_240_shared_tokens_are_240_reused_tokens(engine):
    first = prompt(400)
    tokens = fork(first, 240)
    ask(engine, first)
    out = ask(engine, tokens)
    assert_reused(out.report, 240)
    assert_right(out, tokens)


def test_no_sharing_and_sharing_that_is_not_usable_are_told_apart(store, engine):
    before = store.store.stats()
    first = prompt(400)
    nothing = ask(engine, first).report
    assert (nothing["matched_tokens"], nothing["miss_reason"]) == (0, "not_stored")
    assert nothing["lost"] == {}
    barred = ask(engine, fork(first, 240), policy=policy(max_replay_tokens=0)).report
    assert (barred["matched_tokens"], barred["used_tokens"]) == (240, 0)
    assert barred["lost"] == {"no_checkpoint": 240}
    assert barred["miss_reason"] == "no_checkpoint"
    grown = since(before, store.store.stats())
    assert grown.queried_tokens == 400 + 280 == grown.matched_tokens + grown.unmatched_tokens
    assert grown.matched_tokens == 240
