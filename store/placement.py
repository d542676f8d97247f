"""Which of several Redis servers has what: rendezvous hashing, a segment of a prefix at a time.

Everybody who knows the same servers picks the same one, and a server that leaves or comes takes
only its own share along. A prefix is of use up to its first hole alone, so that what is used
together is kept together: everything of a segment of `SEGMENT_TOKENS` tokens has one server, chosen
by the name of its first page, which all that share that page have in common. Without that a prompt
of fifty objects over three servers would lose its end, somewhere, with any server.

A prompt of one segment survives the loss of one of N servers with probability (N-1)/N, one of k
segments with the k-th power of that, so segments should be long; and one server serves and holds a
whole segment, so that few long ones would make shares uneven.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind, block_start

SEGMENT_BLOCKS = 64
SEGMENT_TOKENS = SEGMENT_BLOCKS * KV_BLOCK_TOKENS
"""Tokens of a segment; those of a prefix begin at its multiples."""


def owner(places: Sequence[str], digest: bytes) -> int:
    """Return the number of the server that has what is placed by `digest`.

    Args:
        places: `RedisEndpoint.place` of each server, in any order, at least one.
        digest: for an object or a block as of `digest_of`.
    """
    if len(places) == 1:
        return 0
    return max(range(len(places)), key=lambda i: _weight(places[i], digest))


def digest_of(namespace: bytes, placed_by: bytes) -> bytes:
    """Return what the server of a namespace's segment is chosen by.

    Args:
        namespace: 32 bytes.
        placed_by: hash of the prefix that ends with the segment's first page.
    """
    return namespace + placed_by


def placing_token(kind: Kind, end_token: int) -> int:
    """Return how many tokens the prefix has by whose hash an object is placed.

    Args:
        kind: of the object; a block goes where its `kv` object does.
        end_token: one past its last token.
    """
    if kind is Kind.CHECKPOINT:
        # With the block before the one in which it ends, whose manifest speaks of it.
        end_token = block_start(end_token) or end_token
    first = max(end_token - 1, 0) // SEGMENT_TOKENS * SEGMENT_TOKENS
    return min(first + PAGE_TOKENS, end_token)


def children_placed_by(parent_hash: bytes, first_token: int, placed_by: bytes) -> bytes:
    """Return what the set of a block's children is placed by: its segment, or itself as the last.

    What follows the last block of a segment has segments of its own, and none in common.

    Args:
        parent_hash: name of the block.
        first_token: of its children.
        placed_by: what such a child is placed by.
    """
    return placed_by if first_token % SEGMENT_TOKENS else parent_hash


def _weight(place: str, digest: bytes) -> bytes:
    return hashlib.blake2b(place.encode() + b"\0" + digest, digest_size=16).digest()
