"""A token sequence of one namespace, and what follows from it, worked out when first asked for.

The store compares prefixes in two ways. What it knows by its tokens it compares token by token, as
**codes**: 4 bytes a token, or 12 for an extended token of more than 32 bits. No token's code begins
with another's, so runs of codes sort and agree as runs of tokens do. What it has only read of in
Redis, where no tokens are, it compares by running digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tailreplay.store.chain import STATE_BYTES, PrefixChain, sealed_tokens
from tailreplay.store.objects import ObjectName
from tailreplay.store.placement import placing_token

if TYPE_CHECKING:
    import numpy.typing as npt

    from tailreplay.store.objects import Kind
    from tailreplay.store.tokens import ExtendedTokens

CODE_BYTES = 4
"""Bytes of the code of a token below 2**32 - 1."""

_ESCAPE = (1 << 32) - 1
_WIDE_WORDS = 3


class Prompt:
    """A token sequence. Not thread-safe; used by one request.

    Args:
        namespace: 32 bytes.
        tokens: extended tokens `[n]`.
        key: AES key of the running digests, 16 bytes.
        sent_namespace: what the client calls the namespace, by which it names prefixes; None =
            the same.

    Attributes:
        namespace: 32 bytes.
        sent_namespace: 32 bytes.
        tokens: extended tokens `[n]`.
    """

    def __init__(
        self,
        namespace: bytes,
        tokens: ExtendedTokens,
        key: bytes,
        sent_namespace: bytes | None = None,
    ) -> None:
        self.namespace = namespace
        self.sent_namespace = namespace if sent_namespace is None else sent_namespace
        self.tokens = tokens
        self._key = key
        self._codes, self._offsets = _encode(tokens)
        # What is known of the running digests: of the tokens from `_sealed_from` on, once asked.
        self._sealed: npt.NDArray[np.uint64] | None = None
        self._sealed_from = 0
        self._state = bytes(STATE_BYTES)
        self._chain: PrefixChain | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def codes(self, first: int, end: int) -> bytes:
        """Codes of tokens [first, end)."""
        if self._offsets is None:
            return self._codes[first * CODE_BYTES : end * CODE_BYTES]
        return self._codes[int(self._offsets[first]) : int(self._offsets[end])]

    def resume(self, at_token: int, state: bytes) -> None:
        """Takes over how the running digests go on at a token, so that those before are not needed.

        Args:
            at_token: how many tokens are before.
            state: as of `state_at`.
        """
        if self._sealed is None:
            self._sealed_from, self._state = at_token, state

    @property
    def digests(self) -> bytes:
        """Running digests of all tokens, back to back."""
        return self.digests_of(0, len(self))

    def digests_of(self, first: int, end: int) -> bytes:
        """Running digests of tokens [first, end)."""
        sealed = self._sealed
        if sealed is None or first < self._sealed_from:
            if first < self._sealed_from:
                self._sealed_from, self._state = 0, bytes(STATE_BYTES)
            tokens = self.tokens[self._sealed_from :]
            sealed = self._sealed = sealed_tokens(self._key, tokens, self._state)
        start = self._sealed_from
        return sealed[first - start : end - start, 0].tobytes()

    def state_at(self, end_token: int) -> bytes:
        """What running digests behind a token go on from; empty if none were asked for there."""
        if self._sealed is None or end_token <= self._sealed_from:
            return b""
        state: bytes = self._sealed[end_token - 1 - self._sealed_from].tobytes()
        return state

    def name(self, kind: Kind, end_token: int) -> ObjectName:
        """What its object that ends at a token is called."""
        hash_at = self.chain.prefix_hash
        placed_by = hash_at(placing_token(kind, end_token))
        return ObjectName(self.namespace, kind, hash_at(end_token), placed_by)

    @property
    def chain(self) -> PrefixChain:
        """Names of its prefixes."""
        if self._chain is None:
            self._chain = PrefixChain(self.sent_namespace, self.tokens)
        return self._chain


def common_codes(a: bytes, b: bytes) -> int:
    """Leading tokens on which two runs of codes agree."""
    size = min(len(a), len(b)) // CODE_BYTES * CODE_BYTES
    left = np.frombuffer(a[:size], "<u4")
    if a[:size] != b[:size]:
        left = left[: int((left != np.frombuffer(b[:size], "<u4")).argmax())]
    tokens = at = 0
    for escape in map(int, np.flatnonzero(left == _ESCAPE)):
        if escape < at:
            continue  # part of the wide token before
        tokens += escape - at
        if escape + _WIDE_WORDS > len(left):
            return tokens
        tokens, at = tokens + 1, escape + _WIDE_WORDS
    return tokens + len(left) - at


def code_bytes(codes: bytes, tokens: int) -> int:
    """Bytes that the first tokens of a run of codes take."""
    words = np.frombuffer(codes, "<u4")
    if not (words == _ESCAPE).any():
        return tokens * CODE_BYTES
    at = 0
    for _ in range(tokens):
        at += _WIDE_WORDS if words[at] == _ESCAPE else 1
    return at * CODE_BYTES


def tokens_of(codes: bytes) -> ExtendedTokens:
    """The tokens that a run of codes stands for, `[n]` uint64."""
    words = np.frombuffer(codes, "<u4").astype(np.uint64)
    if not (words == _ESCAPE).any():
        return words
    tokens, at = [], 0
    while at < len(words):
        is_wide = words[at] == _ESCAPE
        tokens.append(words[at + 1] | words[at + 2] << np.uint64(32) if is_wide else words[at])
        at += _WIDE_WORDS if is_wide else 1
    return np.array(tokens, np.uint64)


def _encode(tokens: ExtendedTokens) -> tuple[bytes, npt.NDArray[np.int64] | None]:
    """Codes of all tokens, and where each begins; None = at multiples of 4 bytes."""
    wide = tokens >= _ESCAPE
    if not wide.any():
        return tokens.astype("<u4").tobytes(), None
    words = np.where(wide, _WIDE_WORDS, 1)
    starts = np.concatenate([[0], np.cumsum(words)])
    codes = np.empty(int(starts[-1]), "<u4")
    codes[starts[:-1]] = np.where(wide, _ESCAPE, tokens)
    high = starts[:-1][wide]
    codes[high + 1] = tokens[wide] & np.uint64(_ESCAPE)
    codes[high + 2] = tokens[wide] >> np.uint64(32)
    return codes.tobytes(), starts * CODE_BYTES
