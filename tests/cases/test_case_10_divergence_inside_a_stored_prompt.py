"""sglang#22935: a prompt that leaves a stored one in its middle split a node and hit nothing."""

import pytest
from case_helpers import ask, assert_reused, assert_right, fork, prompt

pytestmark = pytest.mark.model


def test_3000_stored_tokens_left_at_1717_reuse_1717(engine):
    first = prompt(3000)
    tokens = fork(first, 1717)
    ask(engine, first)
    out = ask(engine, tokens)
    assert_reused(out.report, 1717)
    assert_right(out, tokens)
