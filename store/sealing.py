"""AES-256-GCM for what lies in Redis, with keys of the operator's that can be changed.

A sealed thing names its key by an id that follows from the key, so that a new key can seal while
old ones still open. What it is sealed for (its Redis key, and for a manifest its field) is
authenticated with it: of two sealed things that are exchanged neither opens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
ID_BYTES = 4
NONCE_BYTES = 12
TAG_BYTES = 16

_ID_CONTEXT = "tailreplay sealing key id v1"


class SealingKeys:
    """Keys by id. Thread-safe: nothing changes after construction.

    Nonces are random, 96 bits: a key is good for 2^32 objects.

    Args:
        keys: 32 bytes each, at least one; the first seals, all open.

    Raises:
        ValueError: one of them has another length.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a sealing key has {len(key)} bytes, wanted {KEY_BYTES}")
        self._ciphers = {key_id(key): AESGCM(key) for key in keys}
        self.first = key_id(keys[0])
        """Id of the key that seals."""

    @classmethod
    def read(cls, files: Sequence[Path]) -> SealingKeys:
        """Read keys, each the raw bytes of a file.

        Raises:
            OSError: a file can not be read.
            ValueError: a file does not have 32 bytes.
        """
        return cls([file.read_bytes() for file in files])

    def knows(self, key: bytes) -> bool:
        """Say whether what is sealed by the key of this id can be opened."""
        return key in self._ciphers

    def seal(self, plain: bytes | memoryview, bound: bytes) -> tuple[bytes, bytes]:
        """Return a fresh nonce, and the ciphertext with its tag, by the first key."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce, self._ciphers[self.first].encrypt(nonce, plain, bound)

    def open(self, key: bytes, nonce: bytes, sealed: bytes, bound: bytes) -> bytes | None:
        """Return what was sealed; None when the key is not known, or anything is not as it was."""
        try:
            return self._ciphers[key].decrypt(nonce, sealed, bound)
        except (KeyError, InvalidTag):
            return None

    def open_into(
        self, key: bytes, nonce: bytes, sealed: memoryview, bound: bytes, into: memoryview
    ) -> bool:
        """As `open`, into memory of the plain length; it may hold anything when this is False."""
        try:
            self._ciphers[key].decrypt_into(nonce, sealed, bound, into)
        except (KeyError, InvalidTag):
            return False
        return True


def key_id(key: bytes) -> bytes:
    """Return what a sealed thing calls its key; says nothing about the key itself."""
    return blake3(key, derive_key_context=_ID_CONTEXT).digest(length=ID_BYTES)
