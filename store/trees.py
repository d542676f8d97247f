"""The trees of all namespaces: blocks and their objects, how they are added and how pruned.

A block is listed with its `kv` object and its pages, of which siblings share those they have in
common. It goes once nothing hangs below it and no payload would go with it, and a namespace goes
with its last block.

Nothing here does I/O or locks: the catalog calls it under its own lock. Rows and nodes are of use
under that lock alone; records outlive it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.blocks import NONE, PAGES, Blocks
from tailreplay.store.checkpoints import Checkpoints
from tailreplay.store.object_rows import Objects
from tailreplay.store.objects import PAGE_TOKENS, Kind
from tailreplay.store.record import EXISTS, Record
from tailreplay.store.views import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Content(NamedTuple):
    """Tokens of a block, or what stands for them.

    Attributes:
        key: the tokens as the index keeps them; of a foreign block their running digests.
        length: how many tokens.
        foreign: 1 = known from Redis alone, else 0.
    """

    key: bytes
    length: int
    foreign: int = 0


@dataclass(slots=True)
class Space:
    """One namespace: its tree's root, its blocks by name, and their tokens."""

    namespace: bytes
    root: int
    blocks: dict[bytes, int]
    tokens: int = 0


class Trees:
    """Every block, and what hangs on it. Not thread-safe.

    Attributes:
        blocks: the rows of blocks.
        objects: the rows of objects.
        checkpoints: which of those are checkpoints, and where.
        spaces: namespaces that have a tree; not to be changed.
    """

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.objects = Objects()
        self.checkpoints = Checkpoints(self.objects)
        self.spaces: dict[bytes, Space] = {}
        self._numbered: dict[int, Space] = {}
        self._next_number = 0
        self._count = 0

    def __len__(self) -> int:
        """How many blocks there are, roots left out."""
        return self._count

    def space(self, namespace: bytes, root_hash: bytes) -> Space:
        """A namespace, with a tree from here on.

        Args:
            namespace: which.
            root_hash: what its root is called.
        """
        space = self.spaces.get(namespace)
        if space is None:
            number = self._next_number
            self._next_number += 1
            # A root has no object, so that its key is its name.
            root = self.blocks.add(NONE, number, 0, 0, root_hash, 0)
            space = self.spaces[namespace] = self._numbered[number] = Space(namespace, root, {})
        return space

    def row(self, namespace: bytes, prefix_hash: bytes) -> int:
        """The block of that name; NONE."""
        space = self.spaces.get(namespace)
        return space.blocks.get(prefix_hash, NONE) if space is not None else NONE

    def add(
        self,
        space: Space,
        parent: int,
        page_hashes: Sequence[bytes],
        content: Content,
        siblings: Sequence[int],
    ) -> int:
        """A new block below `parent`; its pages are those of siblings that have the same.

        Args:
            space: whose.
            parent: row of the block before.
            page_hashes: prefix hash at the end of each of its pages; the last is its own name.
            content: its tokens.
            siblings: rows of blocks that may share pages with it, looked at before those beside it.
        """
        first, name = self.blocks.end(parent), page_hashes[-1]
        key, length, foreign = content
        row = self.blocks.add(parent, self.blocks.spaces[space.root], first, length, key, foreign)
        self.blocks.kv[row] = self.objects.add(Kind.KV, name, first, length, row)
        beside = [*siblings, *self.blocks.beside(row)]
        for number, page_hash in enumerate(page_hashes):
            page = self.shared_page(beside, number, page_hash)
            if page == NONE:
                at = number * PAGE_TOKENS
                rows = min(PAGE_TOKENS, length - at)
                page = self.objects.add(Kind.HIDDEN, page_hash, first + at, rows, row)
            else:
                self.objects.uses[page] += 1
            self.blocks.pages[row * PAGES + number] = page
        space.blocks[name] = row
        space.tokens += length
        self._count += 1
        return row

    def shared_page(self, siblings: Sequence[int], number: int, page_hash: bytes) -> int:
        """The page of that name that a sibling has; NONE."""
        for sibling in siblings:
            page = self.blocks.pages[sibling * PAGES + number]
            if page != NONE and self.objects.name(page) == page_hash:
                return page
        return NONE

    def name(self, row: int) -> bytes:
        """Name of the prefix that ends with a block."""
        kv = self.blocks.kv[row]
        return self.objects.name(kv) if kv != NONE else self.blocks.keys[row]

    def placed_by(self, row: int) -> bytes:
        """Name of the first page of a block's segment; of a root the root's."""
        head = self.blocks.heads[row]
        page = self.blocks.pages[head * PAGES]
        return self.objects.name(page) if page != NONE else self.blocks.keys[head]

    def namespace(self, row: int) -> bytes:
        """Whose a block is."""
        return self._numbered[self.blocks.spaces[row]].namespace

    def has_kv(self, row: int) -> bool:
        """Whether a block's KV exists in some tier."""
        kv = self.blocks.kv[row]
        return kv != NONE and bool(self.objects.states[kv] & EXISTS)

    def pages(self, row: int) -> Iterator[int]:
        """Rows of a block's hidden objects."""
        return (page for page in self.blocks.pages[row * PAGES : (row + 1) * PAGES] if page != NONE)

    def record(self, row: int, namespace: bytes) -> Record:
        """The one record of an object."""
        placed_by = self.objects.placed_by(row) or self.placed_by(self.objects.homes[row])
        return self.objects.record(row, namespace, placed_by)

    def records_of(
        self, rows: Iterable[int], kind: Kind, *, stored: bool = False
    ) -> Iterator[Record]:
        """Objects of some blocks, all of one namespace, ascending by token.

        Args:
            rows: the blocks.
            kind: of the objects.
            stored: whether only those are wanted that exist.
        """
        states = self.objects.states
        namespace = placed_by = b""
        head = NONE
        for block in rows:
            namespace = namespace or self.namespace(block)
            if self.blocks.heads[block] != head:
                head, placed_by = self.blocks.heads[block], self.placed_by(block)
            objects = [self.blocks.kv[block]] if kind is Kind.KV else self.pages(block)
            for row in objects:
                if row != NONE and (not stored or states[row] & EXISTS):
                    yield self.objects.record(row, namespace, placed_by)

    def homes(self, record: Record) -> list[Node]:
        """The blocks that list an object; for a checkpoint the block before its prefix's last."""
        if not record.is_listed:
            return []
        row = record.row
        home = self.objects.homes[row]
        found = [home]
        if self.objects.uses[row] > 1:
            at = self._page_of(home, row)
            for siblings in self.blocks.around(home):
                for sibling in siblings:
                    if self.blocks.pages[sibling * PAGES + at] == row:
                        found.append(sibling)
                if len(found) == self.objects.uses[row]:
                    break
        return [Node(self, block) for block in found]

    def prune(self, record: Record) -> None:
        """Forgets what hangs on a record without payload: itself, and blocks that hold nothing."""
        if record.exists or not record.is_listed:
            return
        blocks = [node.row for node in self.homes(record)]
        if record.name.kind is Kind.CHECKPOINT:
            self.checkpoints.drop(record.row, record.name, record.digest)
        for block in blocks:
            self._prune_from(block)

    def prune_block(self, namespace: bytes, prefix_hash: bytes) -> None:
        """Forgets a block, and those before it, if they hold nothing."""
        space = self.spaces.get(namespace)
        if space is not None:
            self._prune_from(space.blocks.get(prefix_hash, space.root))

    def sizes(self) -> dict[bytes, tuple[int, int]]:
        """Blocks of each namespace with a tree, and their tokens."""
        return {key: (len(space.blocks), space.tokens) for key, space in self.spaces.items()}

    def _page_of(self, block: int, row: int) -> int:
        """Number of an object's page in its block."""
        return (self.objects.firsts[row] - self.blocks.firsts[block]) // PAGE_TOKENS

    def _prune_from(self, block: int) -> None:
        while self.blocks.parents[block] != NONE and self._is_empty(block):
            parent = self.blocks.parents[block]
            self._drop(block)
            block = parent
        if self.blocks.parents[block] == NONE and self._is_bare(block):
            space = self._numbered.pop(self.blocks.spaces[block])
            del self.spaces[space.namespace]
            self.blocks.remove(block)

    def _is_bare(self, block: int) -> bool:
        """Whether nothing hangs below a block."""
        return not self.blocks.has_children(block) and block not in self.checkpoints

    def _is_empty(self, block: int) -> bool:
        """Whether nothing hangs below a block and no payload would go with it."""
        objects = self.objects
        own = any(objects.states[p] & EXISTS and objects.uses[p] == 1 for p in self.pages(block))
        return self._is_bare(block) and not self.has_kv(block) and not own

    def _drop(self, block: int) -> None:
        space = self._numbered[self.blocks.spaces[block]]
        del space.blocks[self.name(block)]
        space.tokens -= self.blocks.lengths[block]
        self._count -= 1
        for page in self.pages(block):
            if self.objects.homes[page] == block and self.objects.uses[page] > 1:
                record = self.record(page, space.namespace)
                self.objects.homes[page] = self.homes(record)[1].row
            self.objects.uses[page] -= 1
            if not self.objects.uses[page]:
                self.objects.free(page)
        self.objects.free(self.blocks.kv[block])
        self.blocks.remove(block)
