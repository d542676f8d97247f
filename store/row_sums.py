"""Checksums of row ranges out of the page checksums that objects carry.

Whoever reads rows checks them against what their engine computed when it stored them: the store
touches no byte on the way, and damage done to its memory meanwhile is seen too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tailreplay.store.checksum import crc32c_of
from tailreplay.store.objects import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.store.header import Header

_REVERSED_POLYNOMIAL = 0x82F63B78
_LEAST_PAGE_BYTES = 16 << 10
"""Below this a page is checksummed faster than its checksum is joined to another's."""


def crc32c_of_rows(
    header: Header, first_unit: int, first_row: int, units: Sequence[memoryview]
) -> int:
    """Checksum of rows of one object as if their units were joined.

    Args:
        header: of the object.
        first_unit: unit of the first view.
        first_row: row of the object at which each view starts.
        units: the rows of each unit; looked at only where they are no whole page.
    """
    row_bytes = header.geometry.row_bytes
    # A size that seldom comes, as of a prompt's last page, is not worth its table.
    page_bytes = (PAGE_TOKENS if header.rows > 1 else 1) * row_bytes
    if page_bytes < _LEAST_PAGE_BYTES:
        return crc32c_of(units)
    pages = -(-header.rows // PAGE_TOKENS)
    crc = 0
    for unit, view in enumerate(units, first_unit):
        at, row = 0, first_row
        while at < len(view):
            whole = 0 if row % PAGE_TOKENS else (len(view) - at) // page_bytes
            page = unit * pages + row // PAGE_TOKENS
            size = whole * page_bytes
            if whole:
                crc = _joined(crc, header.page_crcs[page : page + whole], page_bytes)
            else:
                size = min((PAGE_TOKENS - row % PAGE_TOKENS) * row_bytes, len(view) - at)
                crc = crc32c_of([view[at : at + size]], crc)
            at, row = at + size, row + size // row_bytes
    return crc


def _joined(crc: int, following: Sequence[int], size: int) -> int:
    """Checksum of buffers joined, the first's and then those of `size` bytes each."""
    low, second, third, high = _shift(size)
    for other in following:
        crc = (
            low[crc & 0xFF]
            ^ second[crc >> 8 & 0xFF]
            ^ third[crc >> 16 & 0xFF]
            ^ high[crc >> 24]
            ^ other
        )
    return crc


@lru_cache(maxsize=64)
def _shift(size: int) -> tuple[list[int], ...]:
    """What `size` zero bytes do to a checksum, as a table per byte of it.

    Checksums are polynomials over GF(2), to which a zero bit behind is a linear map; the map of
    many bits is made by squaring.
    """
    total = [1 << i for i in range(32)]
    power = [_REVERSED_POLYNOMIAL, *(1 << i for i in range(31))]
    bits = size * 8
    while bits:
        if bits & 1:
            total = [_times(power, column) for column in total]
        power = [_times(power, column) for column in power]
        bits >>= 1
    return tuple(
        [_times(total, value << place) for value in range(256)] for place in range(0, 32, 8)
    )


def _times(matrix: list[int], vector: int) -> int:
    product = 0
    while vector:
        low = vector & -vector
        product ^= matrix[low.bit_length() - 1]
        vector ^= low
    return product
