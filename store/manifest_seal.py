"""What stands round a value of a manifest, so that a damaged or misplaced one is a miss.

Without sealing keys a value is followed by its mark, 8 bytes of blake3. With them it is encrypted:

    offset  bytes  field
         0      4  id of the sealing key
         4     12  nonce
        16      n  the value
    16 + n     16  tag

Both are over the key, the field and the value.
"""

from __future__ import annotations

from typing import Protocol

from blake3 import blake3

from tailreplay.store.sealing import ID_BYTES, NONCE_BYTES, SealingKeys

MARK_BYTES = 8
_HEAD_BYTES = ID_BYTES + NONCE_BYTES


class Seal(Protocol):
    """Puts values into the form they have in Redis, and takes them out of it."""

    def wrap(self, key: bytes, field: bytes, value: bytes) -> bytes:
        """Return what to store."""

    def unwrap(self, key: bytes, field: bytes, stored: bytes) -> bytes | None:
        """Return the value; None when it is not what was stored there."""


class Marks:
    """Values in the clear, each with its mark. It finds damage, and keeps nobody out."""

    def wrap(self, key: bytes, field: bytes, value: bytes) -> bytes:
        """Append the mark."""
        return value + _mark(key, field, value)

    def unwrap(self, key: bytes, field: bytes, stored: bytes) -> bytes | None:
        """Take the mark off, if it fits."""
        value, mark = stored[:-MARK_BYTES], stored[-MARK_BYTES:]
        return value if mark == _mark(key, field, value) else None


class Encrypted:
    """Values that only those with the key can read, and nobody else can write."""

    def __init__(self, keys: SealingKeys) -> None:
        self._keys = keys

    def wrap(self, key: bytes, field: bytes, value: bytes) -> bytes:
        """Encrypt."""
        nonce, sealed = self._keys.seal(value, _bound(key, field))
        return self._keys.first + nonce + sealed

    def unwrap(self, key: bytes, field: bytes, stored: bytes) -> bytes | None:
        """Decrypt."""
        head, sealed = stored[:_HEAD_BYTES], stored[_HEAD_BYTES:]
        if len(head) < _HEAD_BYTES:
            return None
        return self._keys.open(head[:ID_BYTES], head[ID_BYTES:], sealed, _bound(key, field))


MARKS = Marks()


def _mark(key: bytes, field: bytes, value: bytes) -> bytes:
    return blake3(_bound(key, field) + value).digest(length=MARK_BYTES)


def _bound(key: bytes, field: bytes) -> bytes:
    return len(key).to_bytes(4, "little") + key + len(field).to_bytes(4, "little") + field
