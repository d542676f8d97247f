"""crc32c (Castagnoli), in hardware, of any contiguous buffer."""

from __future__ import annotations

import google_crc32c
import numpy as np


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Checksum of `data`, 0 to 2**32 - 1, without copying it."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    # The C function refuses writable memoryviews but takes an array over the same memory.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))
