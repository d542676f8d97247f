"""What hangs on the blocks along a path: the way from a tree's first block to a named one.

Nothing here does I/O or locks: the catalog calls it under its own lock. Paths of records are
snapshots that outlive it; rows and nodes are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.blocks import NONE
from tailreplay.store.objects import Kind
from tailreplay.store.views import Node, Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.store.record import Record
    from tailreplay.store.trees import Trees


class Paths:
    """Goes along the trees.

    Args:
        trees: which.
    """

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def to(self, namespace: bytes, leaf: bytes, *, hidden: bool = True) -> Path:
        """What hangs on the blocks from the first to the one named `leaf`; empty if not known."""
        return self.snapshot(self._rows_to(namespace, leaf), hidden=hidden)

    def nodes_to(self, namespace: bytes, leaf: bytes) -> list[Node]:
        """Blocks from the first to the one named `leaf`; empty when it is not known."""
        return [Node(self._trees, row) for row in self._rows_to(namespace, leaf)]

    def snapshot(self, rows: Sequence[int], *, hidden: bool = True) -> Path:
        """The objects of some blocks; their hidden pages, PAGES a block, only if so asked."""
        kinds = (Kind.KV, Kind.HIDDEN) if hidden else (Kind.KV,)
        return Path(*(tuple(self._trees.records_of(rows, kind)) for kind in kinds))

    def stored_on(self, rows: Sequence[int]) -> Path:
        """Those objects of some blocks that exist, all of one namespace."""
        kinds = (Kind.KV, Kind.HIDDEN)
        return Path(*(tuple(self._trees.records_of(rows, kind, stored=True)) for kind in kinds))

    def extended_by(self, record: Record) -> Path:
        """What the longest shorter sibling has that this object's block goes on from."""
        home = self._trees.objects.homes[record.row]
        shorter = self._trees.blocks.before(home)
        return self.stored_on([shorter]) if shorter != NONE else Path()

    def is_behind(self, record: Record, prefix_hash: bytes) -> bool:
        """Whether an object is of the block of that name, or of one that goes on from it.

        A page counts if no other block has it; a state, if it ends behind the block's first token
        on any way that leads on from the block before.
        """
        block = self._trees.row(record.name.namespace, prefix_hash)
        if block == NONE:
            return False
        homes = [node.row for node in self._trees.homes(record)]
        if record.name.kind is Kind.CHECKPOINT and homes == [self._trees.blocks.parents[block]]:
            return True
        return bool(homes) and all(self._goes_through(home, block) for home in homes)

    def _rows_to(self, namespace: bytes, leaf: bytes) -> list[int]:
        blocks, at = self._trees.blocks, self._trees.row(namespace, leaf)
        path = []
        while at != NONE and blocks.kv[at] != NONE:
            path.append(at)
            at = blocks.parents[at]
        return path[::-1]

    def _goes_through(self, row: int, block: int) -> bool:
        while row not in (NONE, block):
            row = self._trees.blocks.parents[row]
        return row == block
