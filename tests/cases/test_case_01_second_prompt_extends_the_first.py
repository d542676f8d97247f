"""vllm#51198, vllm#51250: a prompt that extends an earlier one of 561 tokens hit 0 of them.

On a dense hybrid here; a mixture of experts is another row's matter.
"""

import pytest
from case_helpers import ask, assert_reused, assert_right, policy, prompt, since

pytestmark = pytest.mark.model


def test_all_561_tokens_hit_and_only_the_suffix_is_prefilled(store, engine):
    first = prompt(561)
    second = first + prompt(30, seed=1)
    ask(engine, first)
    before = store.store.stats()
    out = ask(engine, second)
    assert_reused(out.report, 561)
    assert since(before, store.store.stats()).matched_tokens == 561
    assert out.report["recomputed_tokens"] == 561 - 512
    assert_right(out, second)


def test_with_a_tail_the_prefill_is_the_suffix_and_the_replay_is_the_tail(store, engine):
    first = prompt(561)
    ask(engine, first)
    out = ask(engine, first + prompt(30, seed=1), policy=policy("tail"))
    assert_reused(out.report, 561)
    assert (out.report["recomputed_tokens"], out.report["replayed_tokens"]) == (0, 64 + 3)
