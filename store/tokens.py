"""Extended tokens: what a prefix is a sequence of.

An extended token is an unsigned 64-bit element: the token id, or for a multimodal placeholder a
digest of (media, offset). The hash chain and every comparison use extended tokens, so media sit at
their position and never split a conversation's text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    ExtendedTokens = npt.NDArray[np.uint64]

MAX_TOKENS = 1 << 22
"""Longest prefix a store accepts, in tokens."""

_MAX_TOKEN_ID = (1 << 32) - 1
_MAX_ELEMENT = (1 << 64) - 1


def extended_tokens(
    ids: Sequence[int] | npt.NDArray[np.integer], media: Mapping[int, int] | None = None
) -> ExtendedTokens:
    """Extended tokens `[n]` uint64 of token ids and the positions that stand for media.

    Args:
        ids: token ids, each in [0, 2**32).
        media: position -> 64-bit digest of (media, offset within it).

    Raises:
        InvalidRequest: an id, a position or a digest is out of range.
    """
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise InvalidRequest(f"token ids are no list of integers: {error}") from None
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidRequest(
            f"token ids have shape {array.shape} and dtype {array.dtype}, "
            "wanted one dimension of integers (of a tokenizer's output, one prompt's input_ids)"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) > _MAX_TOKEN_ID):
        bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise InvalidRequest(f"token id {bad} is out of range, wanted 0 to {_MAX_TOKEN_ID}")
    tokens = array.astype(np.uint64)
    for position, value in (media or {}).items():
        if not 0 <= position < len(tokens):
            raise InvalidRequest(f"media position {position} is outside the {len(tokens)} tokens")
        if not 0 <= value <= _MAX_ELEMENT:
            raise InvalidRequest(f"media digest {value} is out of range, wanted 64 bits")
        tokens[position] = value
    return tokens


def to_wire(tokens: ExtendedTokens) -> pb.Tokens:
    """The message that carries `tokens`; elements above 32 bits go into its sparse list."""
    wide = np.flatnonzero(tokens > _MAX_TOKEN_ID)
    ids = tokens.astype("<u4")
    ids[wide] = 0
    return pb.Tokens(
        ids=ids.tobytes(),
        extended=[pb.ExtendedToken(position=int(i), value=int(tokens[i])) for i in wide],
    )


def from_wire(message: pb.Tokens) -> ExtendedTokens:
    """Extended tokens `[n]` uint64 of a received message.

    Raises:
        InvalidRequest: the bytes are not whole 32-bit ids, there are too many, or an extended
            position is out of range or order.
    """
    if len(message.ids) % 4:
        raise InvalidRequest(f"Tokens.ids has {len(message.ids)} bytes, wanted a multiple of 4")
    if len(message.ids) // 4 > MAX_TOKENS:
        raise InvalidRequest(
            f"{len(message.ids) // 4} tokens, wanted at most {MAX_TOKENS} (MAX_TOKENS)"
        )
    tokens = np.frombuffer(message.ids, "<u4").astype(np.uint64)
    last = -1
    for element in message.extended:
        if not last < element.position < len(tokens):
            raise InvalidRequest(
                f"extended position {element.position} follows {last} among {len(tokens)} tokens, "
                "wanted ascending positions within them"
            )
        tokens[element.position] = element.value
        last = element.position
    return tokens
