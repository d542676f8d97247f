"""Extended tokens, and their form on the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.tokens import MAX_TOKENS, extended_tokens, from_wire, to_wire

wide = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.integers(0, (1 << 32) - 1)), st.data())
def test_what_goes_over_the_wire_comes_back(ids, data):
    positions = st.integers(0, len(ids) - 1)
    media = data.draw(st.dictionaries(positions, wide)) if ids else {}
    tokens = extended_tokens(ids, media)
    assert tokens.tolist() == [media.get(i, token) for i, token in enumerate(ids)]
    message = pb.Tokens.FromString(to_wire(tokens).SerializeToString())
    assert np.array_equal(from_wire(message), tokens)
    assert len(message.ids) == 4 * len(ids)


def test_ids_are_little_endian_and_only_wide_elements_are_listed():
    message = to_wire(extended_tokens([1, 0xFFFFFFFF, 7], {2: 1 << 32}))
    assert message.ids == bytes.fromhex("01000000ffffffff00000000")
    assert [(e.position, e.value) for e in message.extended] == [(2, 1 << 32)]


def test_arrays_of_any_integer_type_are_taken():
    for dtype in (np.int32, np.int64, np.uint8):
        assert extended_tokens(np.arange(5, dtype=dtype)).dtype == np.uint64


@pytest.mark.parametrize(
    ("ids", "media", "message"),
    [
        ([1, -1], {}, "token id -1 is out of range, wanted 0 to 4294967295"),
        ([1 << 32], {}, "token id 4294967296 is out of range"),
        ([1.5], {}, "dtype float64"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([1, [2]], {}, "no list of integers"),
        (["a"], {}, "wanted one dimension of integers"),
        ([1], {1: 5}, "media position 1 is outside the 1 tokens"),
        ([1], {0: 1 << 64}, "media digest 18446744073709551616 is out of range"),
        ([1], {0: -1}, "media digest -1 is out of range"),
    ],
)
def test_bad_tokens_are_refused_by_name_and_value(ids, media, message):
    with pytest.raises(InvalidRequest, match=message):
        extended_tokens(ids, media)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.Tokens(ids=b"\0" * 5), "has 5 bytes, wanted a multiple of 4"),
        (pb.Tokens(ids=bytes(4 * (MAX_TOKENS + 1))), f"wanted at most {MAX_TOKENS}"),
        (pb.Tokens(ids=b"\0" * 4, extended=[pb.ExtendedToken(position=1)]), "position 1"),
        (
            pb.Tokens(
                ids=b"\0" * 8,
                extended=[pb.ExtendedToken(position=1), pb.ExtendedToken(position=1)],
            ),
            "position 1 follows 1 among 2 tokens",
        ),
    ],
)
def test_a_malformed_message_is_refused(message, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        from_wire(message)
