"""Checksums, with and without the compiled part."""

import random
from itertools import pairwise

import google_crc32c
import numpy as np
import pytest

from tailreplay.store import checksum

DATA = np.random.default_rng(3).integers(0, 256, 1 << 20, np.uint8)


@pytest.fixture(params=["compiled", "plain"])
def sums(request, monkeypatch):
    """Both ways."""
    if request.param == "plain":
        monkeypatch.setattr(checksum, "_compiled", None)
        monkeypatch.setattr(checksum, "_compiled_join", None)
        monkeypatch.setattr(checksum, "_compiled_pages", None)
    elif checksum._compiled is None:
        pytest.skip("the compiled part was not built")
    return checksum


def draws(seed, count):
    """Places of data of all lengths that go one way or another, at any alignment."""
    draw = random.Random(seed)
    for _ in range(count):
        size = draw.choice([draw.randrange(700), draw.randrange(9000), draw.randrange(1 << 19)])
        at = draw.randrange(len(DATA) - size)
        yield DATA[at : at + size], draw.getrandbits(32)


def test_it_is_the_castagnoli_checksum(sums):
    assert sums.crc32c(b"123456789") == 0xE3069283
    assert sums.crc32c(b"") == 0
    assert sums.crc32c(bytes(32)) == 0x8A9136AA


@pytest.mark.parametrize("seed", range(4))
def test_any_length_at_any_place_behind_anything(sums, seed):
    for data, before in draws(seed, 50):
        wanted = google_crc32c.extend(before, data.tobytes())
        assert sums.crc32c_of([data.data], before) == wanted


@pytest.mark.parametrize("wide", [True, False])
def test_every_width_of_register_gives_the_same(wide):
    if checksum._compiled is None:
        pytest.skip("the compiled part was not built")
    for data, before in draws(9, 200):
        wanted = google_crc32c.extend(before, data.tobytes())
        assert checksum._compiled(data, before, wide) == wanted


def test_buffers_are_summed_as_if_joined(sums):
    cuts = [0, 1, 130, 131, 700, 5000, 300_000, len(DATA)]
    parts = [DATA[a:b].data for a, b in pairwise(cuts)]
    assert sums.crc32c_of(parts) == google_crc32c.value(DATA.tobytes())


@pytest.mark.parametrize("size", [8, 9, 15, 16, 17, 1000, 65_536, 131_071])
@pytest.mark.parametrize("others", [0, 1, 7])
def test_checksums_are_joined_without_the_bytes(sums, size, others):
    first, rest = DATA[:77], DATA[77 : 77 + others * size]
    following = tuple(google_crc32c.value(rest[at : at + size]) for at in range(0, len(rest), size))
    wanted = google_crc32c.value(DATA[: 77 + len(rest)])
    assert sums.joined(google_crc32c.value(first), following, size) == wanted


@pytest.mark.parametrize("size", [0, 1, 100, 1000, 65_536, 65_537, 300_001])
@pytest.mark.parametrize(("unit", "page"), [(1, 1), (100, 100), (250, 100), (100, 250), (6400, 64)])
def test_pages_end_with_their_unit(sums, size, unit, page):
    size = min(size, unit * 600)
    data = DATA[:size].tobytes()
    units = [data[at : at + unit] for at in range(0, size, unit)]
    pages = [u[at : at + page] for u in units for at in range(0, len(u), page)]
    wanted = [google_crc32c.value(one) for one in pages]
    assert list(sums.page_checksums(memoryview(data), unit, page)) == wanted


@pytest.mark.parametrize(("unit", "page"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_units_and_pages_have_a_size(sums, unit, page):
    with pytest.raises(ValueError, match="wanted"):
        sums.page_checksums(b"abc", unit, page)


def test_what_is_not_contiguous_is_refused(sums):
    with pytest.raises((BufferError, ValueError)):
        sums.crc32c(memoryview(DATA)[::2])
