"""Checksums of row ranges, joined out of page checksums."""

import random

import numpy as np
import pytest

from tailreplay.store.checksum import crc32c, crc32c_of
from tailreplay.store.errors import IntegrityError
from tailreplay.store.geometry import Dtype, checkpoint_geometry, kv_geometry
from tailreplay.store.header import Header, build_parts, parse_header
from tailreplay.store.objects import ObjectName
from tailreplay.store.row_sums import check_pages, crc32c_of_rows

KV = kv_geometry(fa_layers=2, kv_heads=2, head_dim=128, dtype=Dtype.BFLOAT16)
STATE = checkpoint_geometry(
    shape=(2, 3, 2, 64, 64, 3), dtype=Dtype.BFLOAT16, state_dtype=Dtype.FLOAT32
)
SMALL = kv_geometry(fa_layers=1, kv_heads=2, head_dim=4, dtype=Dtype.FLOAT32)


def stored(geometry, rows):
    """Header and payload `[units, rows, row bytes]` of an object."""
    data = np.random.default_rng(rows).bytes(geometry.payload_bytes(rows))
    name = ObjectName(bytes(32), geometry.kind, bytes(32))
    head, payload = build_parts(Header(name, geometry, 0, rows, ()), [data])
    units = np.frombuffer(payload, np.uint8).reshape(geometry.units, rows, geometry.row_bytes)
    return parse_header(b"".join([head, payload])), units


def views(units):
    return [np.ascontiguousarray(unit).reshape(-1).data for unit in units]


@pytest.mark.parametrize(
    ("geometry", "rows"), [(KV, 256), (KV, 200), (KV, 1), (STATE, 1), (SMALL, 256)]
)
def test_any_rows_have_the_checksum_of_their_bytes(geometry, rows):
    header, units = stored(geometry, rows)
    draw = random.Random(rows)
    for _ in range(40):
        first, end = sorted(draw.sample(range(rows + 1), 2))
        unit = draw.randrange(geometry.units)
        some = views(units[unit : unit + draw.randint(1, geometry.units), first:end])
        assert crc32c_of_rows(header, unit, first, some) == crc32c_of(some)


def test_whole_pages_are_not_looked_at():
    header, units = stored(KV, 256)
    blank = views(np.zeros_like(units))
    assert crc32c_of_rows(header, 0, 0, blank) == crc32c(units.tobytes())
    cut = views(np.zeros_like(units)[:, 10:])
    assert crc32c_of_rows(header, 0, 10, cut) != crc32c(units[:, 10:].tobytes())


@pytest.mark.parametrize(
    ("geometry", "rows"), [(KV, 256), (KV, 200), (KV, 1), (STATE, 1), (SMALL, 256), (SMALL, 70)]
)
def test_damage_shows_in_a_page_or_in_the_checksum_of_rows(geometry, rows):
    """Whatever rows are sent: a flipped bit in them is seen by the store, or by their reader."""
    header, units = stored(geometry, rows)
    draw = random.Random(rows)
    for _ in range(40):
        first, end = sorted(draw.sample(range(rows + 1), 2))
        unit, row = draw.randrange(geometry.units), draw.randrange(first, end)
        check_pages(header, units.tobytes(), range(geometry.units), range(first, end))
        spoilt = units.copy()
        spoilt[unit, row, draw.randrange(geometry.row_bytes)] ^= 4
        sent = views(spoilt[:, first:end])
        try:
            payload = memoryview(spoilt.tobytes())
            check_pages(header, payload, range(geometry.units), range(first, end))
        except IntegrityError:
            continue
        assert crc32c_of_rows(header, 0, first, sent) != crc32c_of(sent)
        check_pages(header, payload, range(0), range(first, end))


def test_pages_that_go_under_their_own_checksum_are_not_looked_at_twice():
    header, units = stored(KV, 256)
    blank = memoryview(bytes(units.nbytes))
    check_pages(header, blank, range(KV.units), range(64, 192))
    with pytest.raises(IntegrityError, match="page 1 of unit 0 is damaged"):
        check_pages(header, blank, range(KV.units), range(65, 192))
