"""How requests to Redis are cut."""

from hypothesis import given
from hypothesis import strategies as st

from tailreplay.store.slices import SLICE_BYTES, Slice, cut

SIZES = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 10**6)),
    st.sampled_from([1, 4096, 100_000, 3 << 20, 9 << 20]),
    max_size=60,
)


@given(SIZES)
def test_every_key_is_in_one_slice_with_its_size_among_its_kind(sizes):
    slices = cut(sizes, kind_of=lambda key: key[0])
    assert {key: s.size for s in slices for key in s.keys} == sizes
    assert sum(len(s.keys) for s in slices) == len(sizes)
    for s in slices:
        assert len({kind for kind, _ in s.keys}) == 1
        assert len(s.keys) == 1 or len(s.keys) * s.size <= SLICE_BYTES


def test_keys_keep_their_order_and_fill_slices():
    slices = cut(dict.fromkeys(range(5), 3 << 20), kind_of=lambda _: 1)
    assert [s.keys for s in slices] == [[0, 1], [2, 3], [4]]


def test_a_slice_takes_whole_pages_and_splits_anywhere():
    whole = Slice([1, 2, 3], 4097)
    assert (whole.stride_bytes, whole.pool_bytes) == (8192, 24576)
    assert whole.split(1) == (Slice([1], 4097), [Slice([2, 3], 4097)])
    assert whole.split(3) == whole.split(9) == (whole, [])
