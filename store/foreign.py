"""What is known from Redis alone: blocks and states by their running digests, not by their tokens.

A prompt that goes through one brings its tokens, by which it is known from then on (`index.py`).

Nothing here does I/O or locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tailreplay.store.blocks import NONE
from tailreplay.store.chain import DIGEST_BYTES
from tailreplay.store.objects import PAGE_TOKENS
from tailreplay.store.trees import Content
from tailreplay.store.views import Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.store.objects import ObjectName
    from tailreplay.store.record import Record
    from tailreplay.store.trees import Trees
    from tailreplay.store.views import Block

_MOST_GROUPS = 32
"""Groups of siblings in the other order that are looked at for a page in common."""


class Foreign:
    """Puts into the trees what manifests describe.

    Args:
        trees: which.
    """

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def restore(self, block: Block) -> Node | None:
        """Puts a block back that a manifest describes; None when the block before it is unknown.

        Blocks come in order of `first_token`. The root of a namespace has no digests.
        """
        trees = self._trees
        if not block.digests:
            return Node(trees, trees.space(block.namespace, block.prefix_hash).root)
        space = trees.spaces.get(block.namespace)
        if space is None and block.first_token == 0:
            space = trees.space(block.namespace, block.parent_hash)
        if space is None:
            return None
        known = space.blocks.get(block.prefix_hash, NONE)
        if known != NONE:
            return Node(trees, known)
        at_root = block.first_token == 0
        parent = space.root if at_root else space.blocks.get(block.parent_hash, NONE)
        if parent == NONE or trees.blocks.end(parent) != block.first_token:
            return None
        length = len(block.digests) // DIGEST_BYTES
        siblings = self._with_pages(parent, block.page_hashes)
        content = Content(block.digests, length, foreign=1)
        return Node(trees, trees.add(space, parent, block.page_hashes, content, siblings))

    def checkpoint(self, parent: Node, name: ObjectName, end_token: int, digest: bytes) -> Record:
        """The record of a state that ends in a block below `parent`; made if it is new.

        Args:
            parent: the block before.
            name: of the object.
            end_token: tokens it has seen.
            digest: running digest of the last of them.
        """
        row = self._trees.checkpoints.add(parent.row, name, end_token, digest, b"")
        return self._trees.record(row, name.namespace)

    def _with_pages(self, parent: int, page_hashes: Sequence[bytes]) -> list[int]:
        """A child known by its tokens that has the first of these pages, as many as one has.

        The order of those children says nothing of names: of all that agree on a page one is
        looked at, and of each page so many.
        """
        best: list[int] = []
        children = self._trees.blocks.known_children(parent)
        within = range(len(children))
        for number, page_hash in enumerate(page_hashes):
            groups = self._trees.blocks.groups(children, within, (number + 1) * PAGE_TOKENS)
            for group in islice(groups, _MOST_GROUPS):
                first = [children[group.start]]
                if self._trees.shared_page(first, number, page_hash) != NONE:
                    best, within = first, group
                    break
            else:
                break
        return best
