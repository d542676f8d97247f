"""sglang#21158: a prompt sent again hit nothing, because the state is after its last token."""

import pytest
from case_helpers import ask, assert_reused, assert_right, prompt

pytestmark = pytest.mark.model


def test_1000_tokens_sent_twice_reuse_999(engine):
    tokens = prompt(1000)
    ask(engine, tokens)
    out = ask(engine, tokens)
    assert_reused(out.report, 999)
    assert_right(out, tokens)
