"""vllm#40696: prefixes of 480, 552 and 979 tokens hit 0, 528 and 528 of them."""

import pytest
from case_helpers import ask, assert_reused, assert_right, fork, prompt

pytestmark = pytest.mark.model


@pytest.mark.parametrize("shared", [480, 552, 979])
def test_a_prefix_hits_in_full_whatever_its_length(engine, shared):
    first = prompt(shared + 100)
    tokens = fork(first, shared)
    ask(engine, first)
    out = ask(engine, tokens)
    assert_reused(out.report, shared)
    assert_right(out, tokens)
