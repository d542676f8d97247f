"""crc32c (Castagnoli), in hardware, of any contiguous buffer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_compiled: Callable[..., int] | None
_compiled_join: Callable[..., int] | None
_compiled_pages: Callable[..., tuple[int, ...]] | None
try:  # four times as fast
    from tailreplay.store._crc32c import crc32c as _compiled
    from tailreplay.store._crc32c import join as _compiled_join
    from tailreplay.store._crc32c import page_checksums as _compiled_pages
except ImportError:  # it is built where there is a C compiler, and runs where the processor can
    _compiled = _compiled_join = _compiled_pages = None

_REVERSED_POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Checksum of `data`, 0 to 2**32 - 1, without copying it."""
    return crc32c_of([data])


def crc32c_of(parts: Iterable[bytes | bytearray | memoryview], crc: int = 0) -> int:
    """Checksum of buffers as if they were joined, behind bytes whose checksum is `crc`."""
    for part in parts:
        if _compiled is not None:
            crc = _compiled(part, crc)
        else:
            # The C function refuses writable memoryviews but takes an array over the same memory.
            crc = int(google_crc32c.extend(crc, np.frombuffer(part, np.uint8)))
    return crc


def page_checksums(
    data: bytes | bytearray | memoryview, unit_bytes: int, page_bytes: int
) -> tuple[int, ...]:
    """Checksum of each page of units that lie back to back; a unit's last page may be shorter.

    Raises:
        ValueError: units or pages are empty.
    """
    if min(unit_bytes, page_bytes) < 1:
        raise ValueError(f"units of {unit_bytes} bytes and pages of {page_bytes}, wanted 1 or more")
    if _compiled_pages is not None:
        return _compiled_pages(data, unit_bytes, page_bytes)
    array, checksum = np.frombuffer(data, np.uint8), google_crc32c.value
    if unit_bytes % page_bytes == 0:
        unit_bytes = max(len(array), 1)
    return tuple(
        checksum(array[at : min(at + page_bytes, unit + unit_bytes)])
        for unit in range(0, len(array), unit_bytes)
        for at in range(unit, min(unit + unit_bytes, len(array)), page_bytes)
    )


def joined(crc: int, following: tuple[int, ...], size: int) -> int:
    """Checksum of buffers joined, out of the first's and then those of `size` bytes each.

    Args:
        crc: of the first.
        following: of the others, in order.
        size: bytes of each of those, at least 8.
    """
    if _compiled_join is not None:
        return _compiled_join(crc, following, size)
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
