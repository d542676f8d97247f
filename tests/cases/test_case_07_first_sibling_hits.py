"""vllm PR 46384: a state kept near the end of 1946 tokens did not help the 560 that are shared."""

import pytest
from case_helpers import ask, assert_reused, assert_right, fork, prompt

pytestmark = pytest.mark.model


def test_the_first_prompt_that_shares_560_tokens_reuses_560(engine):
    first = prompt(1946)
    tokens = fork(first, 560)
    ask(engine, first)
    out = ask(engine, tokens)
    assert_reused(out.report, 560)
    assert_right(out, tokens)
