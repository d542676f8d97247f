"""What stands before a payload in Redis, so that a wrong value is seen whatever made it wrong.

    offset  bytes  field
         0      4  magic "TRV1"
         4      1  version, 1
         5      1  flags, 0
         6      2  reserved, 0
         8      8  payload length in bytes
        16      4  crc32c of the key, then the payload
        20      8  reserved, 0
        28      4  crc32c of the 28 bytes above

Integers are little-endian. The key is in the checksum, so that a value found under another key is
as wrong as a damaged one.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np

ENVELOPE_BYTES = 32

_MAGIC = b"TRV1"
_VERSION = 1
_FIELDS = struct.Struct("<4sBBHQIQ")
_CRC = struct.Struct("<I")
_STEP_BYTES = 256 << 10
"""Checksummed at a time: the checksum keeps the interpreter's lock."""


def seal(key: bytes, payload: memoryview) -> bytes:
    """Return the envelope for a payload stored under `key`."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, 0, 0, len(payload), _checksum(key, payload), 0)
    return fields + _CRC.pack(google_crc32c.value(fields))


def is_intact(envelope: bytes, key: bytes, payload: memoryview) -> bool:
    """Say whether these are the very envelope and payload that were stored under `key`."""
    return len(envelope) == ENVELOPE_BYTES and envelope == seal(key, payload)


def _checksum(key: bytes, payload: memoryview) -> int:
    checksum: int = google_crc32c.value(key)
    for start in range(0, len(payload), _STEP_BYTES):
        # As an array, because google_crc32c takes no memoryview.
        step = np.frombuffer(payload[start : start + _STEP_BYTES], np.uint8)
        checksum = google_crc32c.extend(checksum, step)
    return checksum
