"""What stands before a payload in Redis, so that a wrong value is seen whatever made it wrong.

    offset  bytes  field
         0      4  magic "TRV1"
         4      1  version, 1
         5      1  flags: 1 = sealed
         6      2  reserved, 0
         8      8  payload length in bytes
        16      4  crc32c of the key, then the payload; if sealed, id of the sealing key
        20      8  reserved, 0
        28      4  crc32c of the 28 bytes above

Integers are little-endian. The key is in the checksum, so that a value found under another key is
as wrong as a damaged one. A sealed value goes on with a nonce of 12 bytes, the encrypted payload
and a tag of 16; the key and the 32 bytes above are authenticated with it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Protocol

import google_crc32c
import numpy as np

from tailreplay.store.sealing import ID_BYTES, NONCE_BYTES, TAG_BYTES, SealingKeys

ENVELOPE_BYTES = 32

_MAGIC = b"TRV1"
_VERSION = 1
_SEALED = 1
_FIELDS = struct.Struct("<4sBBHQ4sQ")
_CRC = struct.Struct("<I")
_ID_AT = 16
_STEP_BYTES = 256 << 10
"""Checksummed at a time: the checksum keeps the interpreter's lock."""


class Content(enum.Enum):
    """What a value turned out to be."""

    GOOD = enum.auto()
    WRONG = enum.auto()
    FOREIGN = enum.auto()
    """Sealed by a key that is not known here, and perhaps good for others."""


class Envelope(Protocol):
    """Puts payloads into the form they have in Redis, and takes them out of it."""

    def wrap(self, key: bytes, payload: memoryview) -> Sequence[memoryview]:
        """Return the parts of the value to store."""

    def room(self, payload: memoryview) -> Sequence[memoryview]:
        """Return memory to read a value into, of which `payload` is to become the payload."""

    def unwrap(self, key: bytes, room: Sequence[memoryview], payload: memoryview) -> Content:
        """Judge a value that was read into `room`; when it is GOOD, `payload` holds its payload."""


def payload_bytes(head: bytes) -> int | None:
    """Return the length of a payload by its value's first bytes; None if it is none of ours."""
    fields, checksum = head[: _FIELDS.size], head[_FIELDS.size :]
    if len(head) != ENVELOPE_BYTES or checksum != _CRC.pack(google_crc32c.value(fields)):
        return None
    magic, version, _, _, size, *_ = _FIELDS.unpack(fields)
    return int(size) if (magic, version) == (_MAGIC, _VERSION) else None


class Plain:
    """Payloads as they are, under a checksum; they are read where they are to be."""

    def wrap(self, key: bytes, payload: memoryview) -> Sequence[memoryview]:
        """Put the envelope before the payload."""
        return memoryview(_plain_head(key, payload)), payload

    def room(self, payload: memoryview) -> Sequence[memoryview]:
        """Memory for the envelope, and the payload's own."""
        return memoryview(bytearray(ENVELOPE_BYTES)), payload

    def unwrap(self, key: bytes, room: Sequence[memoryview], payload: memoryview) -> Content:
        """Check the envelope."""
        return Content.GOOD if room[0] == _plain_head(key, payload) else Content.WRONG


class Sealed:
    """Payloads that only those with the key can read, and nobody else can write."""

    def __init__(self, keys: SealingKeys) -> None:
        self._keys = keys

    def wrap(self, key: bytes, payload: memoryview) -> Sequence[memoryview]:
        """Encrypt the payload."""
        head = _head(_SEALED, len(payload), self._keys.first)
        nonce, sealed = self._keys.seal(payload, head + key)
        return memoryview(head + nonce), memoryview(sealed)

    def room(self, payload: memoryview) -> Sequence[memoryview]:
        """Memory for the whole value, since a payload can not be decrypted in place."""
        head = memoryview(bytearray(ENVELOPE_BYTES + NONCE_BYTES))
        return head, memoryview(bytearray(len(payload) + TAG_BYTES))

    def unwrap(self, key: bytes, room: Sequence[memoryview], payload: memoryview) -> Content:
        """Decrypt into the payload's memory."""
        head, nonce = bytes(room[0][:ENVELOPE_BYTES]), bytes(room[0][ENVELOPE_BYTES:])
        named = head[_ID_AT : _ID_AT + ID_BYTES]
        if head != _head(_SEALED, len(payload), named):
            return Content.WRONG
        if not self._keys.knows(named):
            return Content.FOREIGN
        good = self._keys.open_into(named, nonce, room[1], head + key, payload)
        return Content.GOOD if good else Content.WRONG


def _plain_head(key: bytes, payload: memoryview) -> bytes:
    return _head(0, len(payload), _CRC.pack(_checksum(key, payload)))


def _head(flags: int, payload_bytes: int, word: bytes) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _VERSION, flags, 0, payload_bytes, word, 0)
    return fields + _CRC.pack(google_crc32c.value(fields))


def _checksum(key: bytes, payload: memoryview) -> int:
    checksum: int = google_crc32c.value(key)
    for start in range(0, len(payload), _STEP_BYTES):
        # As an array, because google_crc32c takes no memoryview.
        step = np.frombuffer(payload[start : start + _STEP_BYTES], np.uint8)
        checksum = google_crc32c.extend(checksum, step)
    return checksum
