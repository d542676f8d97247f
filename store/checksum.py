"""crc32c (Castagnoli), in hardware, of any contiguous buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Checksum of `data`, 0 to 2**32 - 1, without copying it."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    # The C function refuses writable memoryviews but takes an array over the same memory.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def crc32c_of(parts: Iterable[memoryview], crc: int = 0) -> int:
    """Checksum of buffers as if they were joined, behind bytes whose checksum is `crc`."""
    for part in parts:
        crc = int(google_crc32c.extend(crc, np.frombuffer(part, np.uint8)))
    return crc


def page_checksums(
    data: bytes | bytearray | memoryview, unit_bytes: int, page_bytes: int
) -> tuple[int, ...]:
    """Checksum of each page of units that lie back to back; a unit's last page may be shorter."""
    array, checksum = np.frombuffer(data, np.uint8), google_crc32c.value
    if unit_bytes % page_bytes == 0:
        unit_bytes = len(array)
    return tuple(
        checksum(array[at : min(at + page_bytes, unit + unit_bytes)])
        for unit in range(0, len(array), unit_bytes or 1)
        for at in range(unit, unit + unit_bytes, page_bytes)
    )
