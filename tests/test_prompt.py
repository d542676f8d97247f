"""Codes of tokens: they agree exactly as far as the tokens do, wide ones included."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.store.prompt import Prompt, code_bytes, common_codes

KEY = bytes(16)
WIDE = (1 << 32) - 1
"""The first token of more than 4 bytes, whose escape is also what wide tokens consist of."""

tokens = st.lists(st.sampled_from([0, 1, WIDE, 1 << 32, (1 << 64) - 1, WIDE << 32]), max_size=40)


def prompt(ids) -> Prompt:
    return Prompt(bytes(32), np.array(ids, np.uint64), KEY)


@given(tokens, tokens, tokens)
def test_codes_agree_as_far_as_tokens_do(start, a, b):
    a, b = start + a, start + b
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    codes = [prompt(ids).codes(0, len(ids)) for ids in (a, b)]
    assert common_codes(*codes) == shared


@given(tokens, st.data())
def test_codes_of_a_part_are_a_part_of_the_codes(ids, data):
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
    whole = prompt(ids)
    assert whole.codes(first, end) == prompt(ids[first:end]).codes(0, end - first)
    assert code_bytes(whole.codes(0, len(ids)), end) == len(whole.codes(0, end))


@given(tokens, tokens)
def test_codes_sort_with_no_run_between_two_that_share_more(a, b):
    """The neighbour rule: what lies between two runs in order shares as much with both."""
    low, high = sorted(prompt(ids).codes(0, len(ids)) for ids in (a, b))
    middle = prompt(a[: len(a) // 2] + b).codes(0, len(a) // 2 + len(b))
    if low <= middle <= high:
        assert common_codes(low, middle) >= common_codes(low, high)


@pytest.mark.parametrize(("ids", "size"), [([0, WIDE - 1], 8), ([WIDE], 12), ([5, 1 << 40], 16)])
def test_a_plain_token_takes_four_bytes_and_a_wide_one_twelve(ids, size):
    assert len(prompt(ids).codes(0, len(ids))) == size


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=80), st.data())
def test_digests_go_on_from_a_state_as_if_all_were_there(ids, data):
    at = data.draw(st.integers(1, len(ids) - 1))
    whole, later = prompt(ids), prompt(ids)
    assert whole.state_at(at) == b""
    digests = whole.digests
    later.resume(at, whole.state_at(at))
    assert later.digests_of(at, len(ids)) == digests[8 * at :]
    assert later.state_at(len(ids)) == whole.state_at(len(ids))
    assert later.state_at(at) == b""
    assert later.digests == digests, "asked for all of them, it works all of them out"
