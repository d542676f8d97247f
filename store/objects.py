"""Names of stored objects: a namespace, a kind and the hash of the prefix it belongs to."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_TOKENS = 64
"""Tokens in a page: the unit of checksums, of the hash chain and of partial reads."""

KV_BLOCK_TOKENS = 256
"""Tokens in a full `kv` block."""


def block_start(end_token: int) -> int:
    """Where the `kv` block begins in which a prefix of `end_token` tokens ends."""
    return (end_token - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS


class Kind(enum.IntEnum):
    """What a stored object holds. The numbers are part of the stored format and of the proto."""

    KV = 1
    """Keys and values of every full-attention layer for the tokens of one block."""
    HIDDEN = 2
    """Full-attention output hiddens of every replay source for the tokens of one block."""
    CHECKPOINT = 3
    """Conv and recurrent state of every linear layer after one token."""


TAIL_FIGURE_BYTES = 6
"""Tail figures of one replay group: three u16, for relative state errors of .3, .1 and .03."""

MAX_TAIL_FIGURES_BYTES = 96
"""Most bytes of tail figures that an object has: sixteen replay groups."""

BLOCK_TOKENS: Mapping[Kind, int] = {
    Kind.KV: KV_BLOCK_TOKENS,
    Kind.HIDDEN: PAGE_TOKENS,
    Kind.CHECKPOINT: 1,
}
"""Most rows of an object, by kind; its first row lies at a multiple of that."""


class Provenance(enum.IntEnum):
    """How the numbers in an object came about. An exact request is served from EXACT alone."""

    EXACT = 1
    """Equal to a full prefill within the noise of the dtype."""
    APPROXIMATE = 2
    """Computed after an approximate state; `depth` and `eps` in the header say how far."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The key of an object in every tier.

    Attributes:
        namespace: 32 bytes, digest of the model's semantics and the tenant's salt.
        kind: what it holds.
        prefix_hash: 32 bytes, chain hash of the whole prefix up to the object's last token.
        placed_by: prefix hash that says which Redis server has it, as of `placing_token`; no part
            of the name. Empty = its own, where nobody asks Redis.
    """

    namespace: bytes
    kind: Kind
    prefix_hash: bytes
    placed_by: bytes = field(default=b"", compare=False, repr=False)
