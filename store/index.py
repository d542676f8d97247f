"""The token index: the longest stored prefix of a request, at any token.

A namespace is a tree of blocks of at most 256 tokens (`blocks.py`); the tree says what prefixes are
known, and the objects of its blocks (`record.py`) say which payload of them exists, and where.

A match must never be longer than the truth, so every token must be compared in full. Blocks that
were stored here are kept by their tokens: 1 KiB, and equality is equality, at any token and with no
digest to collide. Shorter digests would weigh as little (4 bytes) and be wrong once in 2**32
comparisons; 64-bit ones (2 KiB) are what a block has that is known from Redis alone, where no
tokens are, until a prompt that goes through it brings its tokens. Everything else is plain columns:
a block with its five objects costs 1.6 KB, none of which a collection of garbage walks.

Nothing here does I/O or locks: the store calls it under its own lock. What it gives out is a
snapshot: records stay what they are, and block rows are of use under that lock alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.blocks import NONE, PAGES, Blocks
from tailreplay.store.chain import DIGEST_BYTES
from tailreplay.store.checkpoints import Checkpoints
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind, ObjectName
from tailreplay.store.placement import placing_token
from tailreplay.store.record import EXISTS, Objects, Record
from tailreplay.store.runs import runs_along
from tailreplay.store.views import Block, Match, Node, Path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tailreplay.store.prompt import Prompt


_MOST_GROUPS = 32
"""Groups of siblings in the other order that are looked at for a page in common."""


class _Content(NamedTuple):
    """Tokens of a block, or what stands for them, and how many they are."""

    key: bytes
    length: int
    foreign: int = 0


@dataclass(slots=True)
class _Space:
    """One namespace: its tree's root, its blocks by name, and their tokens."""

    namespace: bytes
    root: int
    blocks: dict[bytes, int]
    tokens: int = 0


class TokenIndex:
    """All namespaces' trees, and every object in them.

    Attributes:
        blocks: the trees.
        objects: what hangs on them.
    """

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.objects = Objects()
        self._spaces: dict[bytes, _Space] = {}
        self._numbered: dict[int, _Space] = {}
        self._next_number = 0
        self._checkpoints = Checkpoints(self.objects)
        self._count = 0

    def match(self, prompt: Prompt) -> Match:
        """Longest stored prefix of a prompt."""
        space = self._spaces.get(prompt.namespace)
        if space is None:
            return Match(0, self)
        at, total, matched = space.root, len(prompt), 0
        path: list[int] = []
        checkpoints: list[int] = []
        while matched < total:
            end = min(matched + KV_BLOCK_TOKENS, total)
            child, shared = self.blocks.exact(at, prompt, matched, end), end - matched
            if child == NONE or not self.has_kv(child):
                # A sibling that goes on from an evicted partial block may have its KV.
                tied, shared = self.blocks.nearest(at, prompt, matched, end)
                child = next(filter(self.has_kv, tied), tied[0] if tied else NONE)
            if at in self._checkpoints:
                checkpoints += self._checkpoints.on(at, prompt, matched, matched + shared)
            if child == NONE:
                break
            path.append(child)
            self._adopt(child, prompt, matched, shared)
            matched += shared
            if shared < KV_BLOCK_TOKENS:
                break
            at = child
        return Match(
            matched,
            self,
            tuple(path),
            self.name(path[-1]) if path else b"",
            tuple(self._record(row, prompt.namespace) for row in checkpoints),
            runs_along(self.blocks, self.objects, path, matched),
        )

    def insert(self, prompt: Prompt, end_token: int | None = None) -> Node:
        """Makes sure that every block of a prompt's first tokens is in the tree.

        Args:
            prompt: whose.
            end_token: how many tokens; all of them if None. Its last block may be partial.

        Returns:
            The last block, or the root.
        """
        end = len(prompt) if end_token is None else end_token
        space = self._space(prompt.namespace, prompt.chain.prefix_hash(0))
        at = NONE
        missing: list[int] = []
        while at == NONE:
            block_end = _block_end(end, len(missing))
            at = self._known(space, prompt, block_end)
            if at == NONE:
                missing.append(block_end)
        for block_end in reversed(missing):
            first = self.blocks.end(at)
            names = [
                prompt.chain.prefix_hash(min(page + PAGE_TOKENS, block_end))
                for page in range(first, block_end, PAGE_TOKENS)
            ]
            # Of both orders: a block that only Redis knew has pages in common just as well.
            siblings, _ = self.blocks.nearest(at, prompt, first, block_end)
            content = _Content(prompt.codes(first, block_end), block_end - first)
            at = self._add(space, at, names, content, siblings)
            self.blocks.note_state(at, prompt.state_at(block_end))
        return Node(self, at)

    def absent_blocks(self, prompt: Prompt, end_token: int) -> int:
        """Blocks of a prompt's first tokens that are not in the tree."""
        space = self._spaces.get(prompt.namespace)
        blocks = -(-end_token // KV_BLOCK_TOKENS)
        for absent in range(blocks if space is not None else 0):
            name = prompt.chain.prefix_hash(_block_end(end_token, absent))
            if space is not None and name in space.blocks:
                return absent
        return blocks

    def restore(self, block: Block) -> Node | None:
        """Puts a block back that a manifest describes; None when the block before it is unknown.

        Blocks come in order of `first_token`. The root of a namespace has no digests.
        """
        if not block.digests:
            return Node(self, self._space(block.namespace, block.prefix_hash).root)
        space = self._spaces.get(block.namespace)
        if space is None and block.first_token == 0:
            space = self._space(block.namespace, block.parent_hash)
        if space is None:
            return None
        known = space.blocks.get(block.prefix_hash, NONE)
        if known != NONE:
            return Node(self, known)
        at_root = block.first_token == 0
        parent = space.root if at_root else space.blocks.get(block.parent_hash, NONE)
        if parent == NONE or self.blocks.end(parent) != block.first_token:
            return None
        length = len(block.digests) // DIGEST_BYTES
        siblings = self._with_pages(parent, block.page_hashes)
        content = _Content(block.digests, length, foreign=1)
        row = self._add(space, parent, block.page_hashes, content, siblings)
        return Node(self, row)

    def block(self, prompt: Prompt, node: Node) -> Block:
        """What a manifest must say of a block of a prompt, so that `restore` can put it back."""
        parent = self.blocks.parents[node.row]
        digests = prompt.digests_of(node.first_token, node.end_token)
        self.blocks.note_state(node.row, prompt.state_at(node.end_token))
        return Block(
            prompt.namespace,
            self.name(node.row),
            self.name(parent) if parent != NONE else b"",
            node.first_token,
            digests,
            tuple(self.objects.name(page) for page in self._pages(node.row)),
            self.placed_by(node.row),
        )

    def tell(self, prompt: Prompt, found: Match, at_token: int) -> None:
        """Tells a prompt what the index knows of it at a block's end, so that it works out less."""
        if at_token:
            row = found.rows[at_token // KV_BLOCK_TOKENS - 1]
            prompt.chain.know(at_token, self.name(row))
            prompt.chain.know(placing_token(Kind.KV, at_token), self.placed_by(row))
            if state := self.blocks.state(row):
                prompt.resume(at_token, state)

    def extended_by(self, record: Record) -> Path:
        """What the longest shorter sibling has that this object's block goes on from."""
        home = self.objects.homes[record.row]
        shorter = self.blocks.before(home)
        return self.stored_on([shorter]) if shorter != NONE else Path()

    def record(self, name: ObjectName) -> Record | None:
        """The record of a `kv` object or a checkpoint, whether or not its payload exists now."""
        if name.kind is Kind.CHECKPOINT:
            row = self._checkpoints.row(name.namespace, name.prefix_hash)
        else:
            space = self._spaces.get(name.namespace)
            block = space.blocks.get(name.prefix_hash, NONE) if space is not None else NONE
            row = self.blocks.kv[block] if block != NONE else NONE
            if name.kind is Kind.HIDDEN:
                raise ValueError("a hidden object has no entry by name, wanted `find`")
        return self._record(row, name.namespace) if row != NONE else None

    def find(self, prompt: Prompt, kind: Kind, end_token: int) -> Record | None:
        """The record of a prompt's object of some kind that ends at a token, if there is one."""
        name = ObjectName(prompt.namespace, kind, prompt.chain.prefix_hash(end_token))
        return self.named(prompt, name, end_token)

    def named(self, prompt: Prompt, name: ObjectName, end_token: int) -> Record | None:
        """As `find`, by the name that it has."""
        if name.kind is not Kind.HIDDEN:
            return self.record(name)
        space = self._spaces.get(prompt.namespace)
        if space is None:
            return None
        first = (end_token - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        parent = space.blocks.get(prompt.chain.prefix_hash(first), NONE) if first else space.root
        if parent == NONE:
            return None
        # The page belongs to every block that shares so many tokens, and only to those.
        tied, shared = self.blocks.nearest(parent, prompt, first, end_token)
        page = (end_token - 1 - first) // PAGE_TOKENS
        for block in tied if shared == end_token - first else ():
            row = self.blocks.pages[block * PAGES + page]
            if row != NONE and self.objects.name(row) == name.prefix_hash:
                return self._record(row, prompt.namespace)
        return None

    def recognise(self, prompt: Prompt, record: Record) -> None:
        """Knows by its tokens what has the name of a prompt's prefix.

        Its digests may be of a key that is in use no more, by which no prompt finds it.
        """
        end = record.end_token
        if record.name.kind is Kind.CHECKPOINT:
            first = (end - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
            self._checkpoints.adopt(record.row, prompt.codes(first, end))
        elif record.name.kind is Kind.KV:
            self._known(self._spaces[prompt.namespace], prompt, end)

    def path_to(self, namespace: bytes, leaf: bytes, *, hidden: bool = True) -> Path:
        """What hangs on the blocks from the first to the one named `leaf`; empty if not known."""
        return self.snapshot(self._rows_to(namespace, leaf), hidden=hidden)

    def nodes_to(self, namespace: bytes, leaf: bytes) -> list[Node]:
        """Blocks from the first to the one named `leaf`; empty when it is not known."""
        return [Node(self, row) for row in self._rows_to(namespace, leaf)]

    def snapshot(self, rows: Sequence[int], *, hidden: bool = True) -> Path:
        """The objects of some blocks; their hidden pages, PAGES a block, only if so asked."""
        kinds = (Kind.KV, Kind.HIDDEN) if hidden else (Kind.KV,)
        return Path(*(tuple(self.records_of(rows, kind)) for kind in kinds))

    def stored_on(self, rows: Sequence[int]) -> Path:
        """Those objects of some blocks that exist, all of one namespace."""
        kinds = (Kind.KV, Kind.HIDDEN)
        return Path(*(tuple(self.records_of(rows, kind, stored=True)) for kind in kinds))

    def record_on(self, block: Node, kind: Kind, end_token: int) -> Record:
        """The record of a block's `kv` object, or of its page that ends at a token."""
        row = self.blocks.kv[block.row]
        if kind is Kind.HIDDEN:
            page = (end_token - 1 - self.blocks.firsts[block.row]) // PAGE_TOKENS
            row = self.blocks.pages[block.row * PAGES + page]
        return self.objects.record(row, self._namespace(block.row), self.placed_by(block.row))

    def checkpoint(self, parent: Node, name: ObjectName, end_token: int, digest: bytes) -> Record:
        """The record of a state that ends in a block below `parent`; made if it is new.

        Args:
            parent: the block before.
            name: of the object.
            end_token: tokens it has seen.
            digest: running digest of the last of them.
        """
        row = self._checkpoints.add(parent.row, name, end_token, digest, b"")
        return self._record(row, name.namespace)

    def checkpoint_of(self, prompt: Prompt, end_token: int) -> Record:
        """As `checkpoint`, of a prompt's first tokens."""
        first = (end_token - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        parent = self.insert(prompt, first)
        name = prompt.name(Kind.CHECKPOINT, end_token)
        digest = prompt.digests_of(end_token - 1, end_token)
        codes = prompt.codes(first, end_token)
        row = self._checkpoints.add(parent.row, name, end_token, digest, codes)
        return self._record(row, name.namespace)

    def is_behind(self, record: Record, prefix_hash: bytes) -> bool:
        """Whether an object is of the block of that name, or of one that goes on from it.

        A page counts if no other block has it; a state, if it ends behind the block's first token
        on any way that leads on from the block before.
        """
        space = self._spaces.get(record.name.namespace)
        block = space.blocks.get(prefix_hash, NONE) if space is not None else NONE
        if block == NONE:
            return False
        homes = [node.row for node in self.homes(record)]
        if record.name.kind is Kind.CHECKPOINT and homes == [self.blocks.parents[block]]:
            return True
        return bool(homes) and all(self._goes_through(home, block) for home in homes)

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
            self._checkpoints.drop(record.row, record.name, record.digest)
        for block in blocks:
            self._prune_from(block)

    def prune_block(self, namespace: bytes, prefix_hash: bytes) -> None:
        """Forgets a block, and those before it, if they hold nothing."""
        space = self._spaces.get(namespace)
        if space is not None:
            self._prune_from(space.blocks.get(prefix_hash, space.root))

    def sizes(self) -> dict[bytes, tuple[int, int]]:
        """Blocks of each namespace with a tree, and their tokens."""
        return {key: (len(space.blocks), space.tokens) for key, space in self._spaces.items()}

    def records(self) -> Iterator[Record]:
        """Every record."""
        for row in self.objects.rows():
            yield self._record(row, self._namespace(self.objects.homes[row]))

    def some_records(self, first: int, count: int) -> tuple[list[Record], int]:
        """Records of at most `count` rows from row `first` on, and the row to go on from; 0 = end.

        What is added meanwhile may or may not be among them.
        """
        kinds = self.objects.kinds
        end = min(first + count, len(kinds))
        some = [
            self._record(row, self._namespace(self.objects.homes[row]))
            for row in range(first, end)
            if kinds[row]
        ]
        return some, end if end < len(kinds) else 0

    def expired(
        self, now_s: float, first: int, count: int, *, most: int, only_redis: bool = False
    ) -> tuple[list[Record], int]:
        """Objects in Redis whose manifest has expired; as `Objects.expired`, records for rows."""
        rows, following = self.objects.expired(
            now_s, first, count, most=most, only_redis=only_redis
        )
        homes = self.objects.homes
        return [self._record(r, self._namespace(homes[r])) for r in rows], following

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
            namespace = namespace or self._namespace(block)
            if self.blocks.heads[block] != head:
                head, placed_by = self.blocks.heads[block], self.placed_by(block)
            objects = [self.blocks.kv[block]] if kind is Kind.KV else self._pages(block)
            for row in objects:
                if row != NONE and (not stored or states[row] & EXISTS):
                    yield self.objects.record(row, namespace, placed_by)

    def name(self, row: int) -> bytes:
        """Name of the prefix that ends with a block."""
        kv = self.blocks.kv[row]
        return self.objects.name(kv) if kv != NONE else self.blocks.keys[row]

    def placed_by(self, row: int) -> bytes:
        """Name of the first page of a block's segment; of a root the root's."""
        head = self.blocks.heads[row]
        page = self.blocks.pages[head * PAGES]
        return self.objects.name(page) if page != NONE else self.blocks.keys[head]

    def has_kv(self, row: int) -> bool:
        """Whether a block's KV exists in some tier."""
        kv = self.blocks.kv[row]
        return kv != NONE and bool(self.objects.states[kv] & EXISTS)

    def __len__(self) -> int:
        return self._count

    def _record(self, row: int, namespace: bytes) -> Record:
        """The one record of an object."""
        placed_by = self.objects.placed_by(row) or self.placed_by(self.objects.homes[row])
        return self.objects.record(row, namespace, placed_by)

    def _namespace(self, row: int) -> bytes:
        return self._numbered[self.blocks.spaces[row]].namespace

    def _pages(self, row: int) -> Iterator[int]:
        """Rows of a block's hidden objects."""
        return (page for page in self.blocks.pages[row * PAGES : (row + 1) * PAGES] if page != NONE)

    def _rows_to(self, namespace: bytes, leaf: bytes) -> list[int]:
        space = self._spaces.get(namespace)
        at = space.blocks.get(leaf, NONE) if space is not None else NONE
        path = []
        while at != NONE and self.blocks.kv[at] != NONE:
            path.append(at)
            at = self.blocks.parents[at]
        return path[::-1]

    def _goes_through(self, row: int, block: int) -> bool:
        while row not in (NONE, block):
            row = self.blocks.parents[row]
        return row == block

    def _page_of(self, block: int, row: int) -> int:
        """Number of an object's page in its block."""
        return (self.objects.firsts[row] - self.blocks.firsts[block]) // PAGE_TOKENS

    def _space(self, namespace: bytes, root_hash: bytes) -> _Space:
        space = self._spaces.get(namespace)
        if space is None:
            number = self._next_number
            self._next_number += 1
            # A root has no object, so that its key is its name.
            root = self.blocks.add(NONE, number, 0, 0, root_hash, 0)
            space = self._spaces[namespace] = self._numbered[number] = _Space(namespace, root, {})
        return space

    def _adopt(self, row: int, prompt: Prompt, first: int, shared: int) -> None:
        """Knows a foreign block by its tokens, if a prompt has them all."""
        if self.blocks.foreign[row] and self.blocks.lengths[row] == shared:
            self.blocks.adopt(row, prompt.codes(first, first + shared))
            self.blocks.note_state(row, prompt.state_at(first + shared))

    def _known(self, space: _Space, prompt: Prompt, end: int) -> int:
        """The block of a prompt that ends at a token; known by its tokens from here on."""
        if not end:
            return space.root
        row = space.blocks.get(prompt.chain.prefix_hash(end), NONE)
        at = row
        while at != NONE and self.blocks.foreign[at]:
            self.blocks.adopt(at, prompt.codes(self.blocks.firsts[at], self.blocks.end(at)))
            at = self.blocks.parents[at]
        return row

    def _add(
        self,
        space: _Space,
        parent: int,
        page_hashes: Sequence[bytes],
        content: _Content,
        siblings: Sequence[int],
    ) -> int:
        """A new block below `parent`; its pages are those of siblings that have the same."""
        first, name = self.blocks.end(parent), page_hashes[-1]
        key, length, foreign = content
        row = self.blocks.add(parent, self.blocks.spaces[space.root], first, length, key, foreign)
        self.blocks.kv[row] = self.objects.add(Kind.KV, name, first, length, row)
        beside = [*siblings, *self.blocks.beside(row)]
        for number, page_hash in enumerate(page_hashes):
            page = self._shared_page(beside, number, page_hash)
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

    def _shared_page(self, siblings: Sequence[int], number: int, page_hash: bytes) -> int:
        """The page of that name that a sibling has; NONE."""
        for sibling in siblings:
            page = self.blocks.pages[sibling * PAGES + number]
            if page != NONE and self.objects.name(page) == page_hash:
                return page
        return NONE

    def _with_pages(self, parent: int, page_hashes: Sequence[bytes]) -> list[int]:
        """A child known by its tokens that has the first of these pages, as many as one has.

        The order of those children says nothing of names: of all that agree on a page one is
        looked at, and of each page so many.
        """
        best: list[int] = []
        children = self.blocks.known_children(parent)
        within = range(len(children))
        for number, page_hash in enumerate(page_hashes):
            groups = self.blocks.groups(children, within, (number + 1) * PAGE_TOKENS)
            for group in islice(groups, _MOST_GROUPS):
                first = [children[group.start]]
                if self._shared_page(first, number, page_hash) != NONE:
                    best, within = first, group
                    break
            else:
                break
        return best

    def _prune_from(self, block: int) -> None:
        while self.blocks.parents[block] != NONE and self._is_empty(block):
            parent = self.blocks.parents[block]
            self._drop(block)
            block = parent
        if self.blocks.parents[block] == NONE and self._is_bare(block):
            space = self._numbered.pop(self.blocks.spaces[block])
            del self._spaces[space.namespace]
            self.blocks.remove(block)

    def _is_bare(self, block: int) -> bool:
        """Whether nothing hangs below a block."""
        return not self.blocks.has_children(block) and block not in self._checkpoints

    def _is_empty(self, block: int) -> bool:
        """Whether nothing hangs below a block and no payload would go with it."""
        objects = self.objects
        own = any(objects.states[p] & EXISTS and objects.uses[p] == 1 for p in self._pages(block))
        return self._is_bare(block) and not self.has_kv(block) and not own

    def _drop(self, block: int) -> None:
        space = self._numbered[self.blocks.spaces[block]]
        del space.blocks[self.name(block)]
        space.tokens -= self.blocks.lengths[block]
        self._count -= 1
        for page in self._pages(block):
            if self.objects.homes[page] == block and self.objects.uses[page] > 1:
                record = self._record(page, space.namespace)
                self.objects.homes[page] = self.homes(record)[1].row
            self.objects.uses[page] -= 1
            if not self.objects.uses[page]:
                self.objects.free(page)
        self.objects.free(self.blocks.kv[block])
        self.blocks.remove(block)


def _block_end(end_token: int, back: int) -> int:
    """Where a block of a prefix ends, so many blocks before its last."""
    return min(end_token, (-(-end_token // KV_BLOCK_TOKENS) - back) * KV_BLOCK_TOKENS)
