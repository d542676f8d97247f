"""The hash chain that names prefixes, and the running digests that compare them token by token.

Chain: one 256-bit hash per page of 64 tokens, each over the hash before it. It names objects. It
depends on the namespace, the extended tokens and nothing else: no process seed, no Python hash.

Running digests: one 64-bit value per token that depends on the whole prefix up to it. Two prefixes
agree in the first L digests exactly when they agree in the first L tokens, so the index can work
on digests alone and a tier that holds them holds no token ids. They are the first half of each
block of an AES-128-CBC pass over the tokens, which makes them a keyed pseudorandom function at the
speed of the hardware's AES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from tailreplay.store.objects import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy.typing as npt

    from tailreplay.store.tokens import ExtendedTokens

DIGEST_BYTES = 8
"""Bytes of one running digest."""

STATE_BYTES = 16
"""Bytes of what the running digests of further tokens go on from."""

_CHAIN_KEY = blake3(b"tailreplay prefix chain v1").digest()
_PAGE_BYTES = PAGE_TOKENS * 8
_DIGEST_CONTEXT = "tailreplay running digest key v1"


class PrefixChain:
    """Hashes of every prefix of one token sequence, each worked out when first asked for.

    Not thread-safe.

    Args:
        namespace: 32 bytes.
        tokens: the sequence, copied.

    Attributes:
        namespace: as given.
    """

    def __init__(self, namespace: bytes, tokens: ExtendedTokens) -> None:
        self.namespace = namespace
        self._data = tokens.astype("<u8").tobytes()
        self._pages = {0: blake3(namespace, key=_CHAIN_KEY).digest()}

    def __len__(self) -> int:
        """How many tokens it is over."""
        return len(self._data) // 8

    @property
    def pages(self) -> list[bytes]:
        """Hash after each whole page, 32 bytes each; pages[i] covers 64 * (i + 1) tokens."""
        return [self._page(page) for page in range(1, len(self._data) // _PAGE_BYTES + 1)]

    def know(self, end_token: int, prefix_hash: bytes) -> None:
        """Takes the hash of a prefix of whole pages from somebody who knows it."""
        self._pages[end_token // PAGE_TOKENS] = prefix_hash

    def prefix_hash(self, end_token: int) -> bytes:
        """Hash of the first `end_token` tokens, 32 bytes; the root hash for 0.

        A prefix that ends inside a page hashes the part of the page that it has, so its name
        differs from that of every other prefix, longer ones included.

        Raises:
            ValueError: there are not so many.
        """
        whole, rest = divmod(end_token, PAGE_TOKENS)
        known = self._pages.get(whole)
        if known is not None and not rest:
            return known
        if not 0 <= end_token * 8 <= len(self._data):
            raise ValueError(f"end_token is {end_token}, wanted 0 to {len(self._data) // 8} tokens")
        previous = self._page(whole)
        if not rest:
            return previous
        part = self._data[whole * PAGE_TOKENS * 8 : end_token * 8]
        return blake3(previous + part, key=_CHAIN_KEY).digest()

    def _page(self, page: int) -> bytes:
        """Hash after so many whole pages."""
        known = page
        while known not in self._pages:
            known -= 1
        previous = self._pages[known]
        for at in range(known, page):
            tokens = self._data[at * _PAGE_BYTES : (at + 1) * _PAGE_BYTES]
            previous = blake3(previous + tokens, key=_CHAIN_KEY).digest()
            self._pages[at + 1] = previous
        return previous


def digest_key(namespace: bytes, secret: bytes = b"") -> bytes:
    """AES key of the running digests, 16 bytes.

    Args:
        namespace: 32 bytes.
        secret: content of the operator's key file. Without one the key follows from the namespace
            and the digests are called unkeyed: they still hold no token ids, but whoever knows the
            namespace can test guesses of whole prefixes.
    """
    return blake3(secret + namespace, derive_key_context=_DIGEST_CONTEXT).digest(length=16)


def sealed_tokens(
    key: bytes, tokens: ExtendedTokens, state: bytes = bytes(STATE_BYTES)
) -> npt.NDArray[np.uint64]:
    """What the cipher makes of tokens, `[n, 2]` uint64.

    Args:
        key: as of `digest_key`.
        tokens: extended tokens `[n]`.
        state: row of the token before them, 16 bytes; zeros at the start of a prompt.

    Returns:
        A row per token: its running digest, then the rest of the state after it.
    """
    if not len(tokens):
        return np.empty((0, 2), np.uint64)
    blocks = np.zeros((len(tokens), 2), "<u8")
    blocks[:, 0] = tokens
    # Of its own size, since the cipher wants room for a block more than it writes.
    sealed = np.empty((len(tokens) + 1, 2), "<u8")
    encryptor = Cipher(AES(key), CBC(state)).encryptor()
    encryptor.update_into(blocks.data.cast("B"), sealed.data.cast("B"))
    return sealed[:-1]


def common_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens on which two runs of digests agree."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // DIGEST_BYTES
    differ = np.frombuffer(a[:size], "<u8") != np.frombuffer(b[:size], "<u8")
    return int(differ.argmax())
