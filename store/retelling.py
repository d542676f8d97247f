"""What manifests said of blocks, told again from the index.

A manifest has the running digests of its block, the index the tokens; they are worked out anew from
where the digests of the block before end, or of one before that.

Nothing here does I/O or locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.blocks import NONE
from tailreplay.store.chain import sealed_tokens
from tailreplay.store.prompt import tokens_of
from tailreplay.store.views import Block

if TYPE_CHECKING:
    from tailreplay.store.trees import Trees
    from tailreplay.store.views import Node


def block_again(trees: Trees, node: Node, namespace: bytes, key: bytes) -> Block | None:
    """A block as its manifest describes it; None if that can not be told.

    Args:
        trees: where it is.
        node: which.
        namespace: whose.
        key: of the running digests.
    """
    blocks, row = trees.blocks, node.row
    parent = blocks.parents[row]
    digests = _digests(trees, row, key) if parent != NONE else b""
    if digests is None:
        return None
    return Block(
        namespace,
        trees.name(row),
        trees.name(parent) if parent != NONE else b"",
        node.first_token,
        digests,
        tuple(trees.objects.name(page) for page in trees.pages(row)),
        trees.placed_by(row),
    )


def _digests(trees: Trees, row: int, key: bytes) -> bytes | None:
    blocks = trees.blocks
    if blocks.foreign[row]:
        return blocks.keys[row]
    at, state, codes = row, b"", []
    while not state and blocks.parents[at] != NONE:
        if blocks.foreign[at]:
            return None
        codes.append(blocks.keys[at])
        at = blocks.parents[at]
        state = blocks.state(at)
    tokens = tokens_of(b"".join(reversed(codes)))
    sealed = sealed_tokens(key, tokens, state) if state else sealed_tokens(key, tokens)
    return sealed[len(sealed) - blocks.lengths[row] :, 0].tobytes()
