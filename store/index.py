"""The token index: the longest stored prefix of a request, at any token.

A namespace is a tree of blocks of at most 256 tokens (`trees.py`, `blocks.py`); the tree says what
prefixes are known, and the objects of its blocks (`record.py`) say which payload of them exists,
and where. Here trees and objects are found by prompts, and grow by them; what only Redis told of is
in `foreign.py`, what hangs along a path in `paths.py`, and what there is at all in `sweep.py`.

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

from typing import TYPE_CHECKING

from tailreplay.store.blocks import NONE, PAGES
from tailreplay.store.foreign import Foreign
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind, ObjectName, block_start
from tailreplay.store.paths import Paths
from tailreplay.store.placement import placing_token
from tailreplay.store.runs import runs_along
from tailreplay.store.sweep import Sweep
from tailreplay.store.trees import Content, Trees
from tailreplay.store.views import Block, Match, Node

if TYPE_CHECKING:
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.record import Record
    from tailreplay.store.trees import Space


class TokenIndex:
    """All namespaces' trees, by the tokens of prompts.

    Attributes:
        trees: the trees, and every object in them.
        foreign: what of them was read of in Redis.
        paths: what hangs along a path.
        sweep: everything, in turn.
    """

    def __init__(self) -> None:
        self.trees = Trees()
        self.foreign = Foreign(self.trees)
        self.paths = Paths(self.trees)
        self.sweep = Sweep(self.trees)
        self._blocks = self.trees.blocks
        self._checkpoints = self.trees.checkpoints

    def match(self, prompt: Prompt) -> Match:
        """Longest stored prefix of a prompt."""
        trees = self.trees
        space = trees.spaces.get(prompt.namespace)
        if space is None:
            return Match(0, trees)
        at, total, matched = space.root, len(prompt), 0
        path: list[int] = []
        checkpoints: list[int] = []
        while matched < total:
            end = min(matched + KV_BLOCK_TOKENS, total)
            child, shared = self._blocks.exact(at, prompt, matched, end), end - matched
            if child == NONE or not trees.has_kv(child):
                # A sibling that goes on from an evicted partial block may have its KV.
                tied, shared = self._blocks.nearest(at, prompt, matched, end)
                child = next(filter(trees.has_kv, tied), tied[0] if tied else NONE)
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
            trees,
            tuple(path),
            trees.name(path[-1]) if path else b"",
            tuple(trees.record(row, prompt.namespace) for row in checkpoints),
            runs_along(self._blocks, trees.objects, path, matched),
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
        space = self.trees.space(prompt.namespace, prompt.chain.prefix_hash(0))
        at = NONE
        missing: list[int] = []
        while at == NONE:
            block_end = _block_end(end, len(missing))
            at = self._known(space, prompt, block_end)
            if at == NONE:
                missing.append(block_end)
        for block_end in reversed(missing):
            at = self._add(space, at, prompt, block_end)
        return Node(self.trees, at)

    def absent_blocks(self, prompt: Prompt, end_token: int) -> int:
        """Blocks of a prompt's first tokens that are not in the tree."""
        space = self.trees.spaces.get(prompt.namespace)
        blocks = -(-end_token // KV_BLOCK_TOKENS)
        for absent in range(blocks if space is not None else 0):
            name = prompt.chain.prefix_hash(_block_end(end_token, absent))
            if space is not None and name in space.blocks:
                return absent
        return blocks

    def block(self, prompt: Prompt, node: Node) -> Block:
        """What a manifest must say of a prompt's block, for `Foreign.restore` to put it back."""
        trees = self.trees
        parent = self._blocks.parents[node.row]
        digests = prompt.digests_of(node.first_token, node.end_token)
        self._blocks.note_state(node.row, prompt.state_at(node.end_token))
        return Block(
            prompt.namespace,
            trees.name(node.row),
            trees.name(parent) if parent != NONE else b"",
            node.first_token,
            digests,
            tuple(trees.objects.name(page) for page in trees.pages(node.row)),
            trees.placed_by(node.row),
        )

    def tell(self, prompt: Prompt, found: Match, at_token: int) -> None:
        """Tells a prompt what the index knows of it at a block's end, so that it works out less."""
        if at_token:
            row = found.rows[at_token // KV_BLOCK_TOKENS - 1]
            prompt.chain.know(at_token, self.trees.name(row))
            prompt.chain.know(placing_token(Kind.KV, at_token), self.trees.placed_by(row))
            if state := self._blocks.state(row):
                prompt.resume(at_token, state)

    def record(self, name: ObjectName) -> Record | None:
        """The record of a `kv` object or a checkpoint, whether or not its payload exists now.

        Raises:
            ValueError: `name` is that of a hidden object.
        """
        if name.kind is Kind.CHECKPOINT:
            row = self._checkpoints.row(name.namespace, name.prefix_hash)
        else:
            block = self.trees.row(name.namespace, name.prefix_hash)
            row = self._blocks.kv[block] if block != NONE else NONE
            if name.kind is Kind.HIDDEN:
                raise ValueError("a hidden object has no entry by name, wanted `find`")
        return self.trees.record(row, name.namespace) if row != NONE else None

    def find(self, prompt: Prompt, kind: Kind, end_token: int) -> Record | None:
        """The record of a prompt's object of some kind that ends at a token, if there is one."""
        name = ObjectName(prompt.namespace, kind, prompt.chain.prefix_hash(end_token))
        return self.named(prompt, name, end_token)

    def named(self, prompt: Prompt, name: ObjectName, end_token: int) -> Record | None:
        """As `find`, by the name that it has."""
        if name.kind is not Kind.HIDDEN:
            return self.record(name)
        space = self.trees.spaces.get(prompt.namespace)
        if space is None:
            return None
        first = block_start(end_token)
        parent = space.blocks.get(prompt.chain.prefix_hash(first), NONE) if first else space.root
        if parent == NONE:
            return None
        # The page belongs to every block that shares so many tokens, and only to those.
        tied, shared = self._blocks.nearest(parent, prompt, first, end_token)
        page = (end_token - 1 - first) // PAGE_TOKENS
        row = NONE
        if shared == end_token - first:
            row = self.trees.shared_page(tied, page, name.prefix_hash)
        return self.trees.record(row, prompt.namespace) if row != NONE else None

    def record_on(self, block: Node, kind: Kind, end_token: int) -> Record:
        """The record of a block's `kv` object, or of its page that ends at a token."""
        row = self._blocks.kv[block.row]
        if kind is Kind.HIDDEN:
            page = (end_token - 1 - self._blocks.firsts[block.row]) // PAGE_TOKENS
            row = self._blocks.pages[block.row * PAGES + page]
        return self.trees.record(row, self.trees.namespace(block.row))

    def checkpoint_of(self, prompt: Prompt, end_token: int) -> Record:
        """The record of the state after a prompt's first tokens; made if it is new."""
        first = block_start(end_token)
        parent = self.insert(prompt, first)
        name = prompt.name(Kind.CHECKPOINT, end_token)
        digest = prompt.digests_of(end_token - 1, end_token)
        codes = prompt.codes(first, end_token)
        row = self._checkpoints.add(parent.row, name, end_token, digest, codes)
        return self.trees.record(row, name.namespace)

    def recognise(self, prompt: Prompt, record: Record) -> None:
        """Knows by its tokens what has the name of a prompt's prefix.

        Its digests may be of a key that is in use no more, by which no prompt finds it.
        """
        end = record.end_token
        if record.name.kind is Kind.CHECKPOINT:
            self._checkpoints.adopt(record.row, prompt.codes(block_start(end), end))
        elif record.name.kind is Kind.KV:
            self._known(self.trees.spaces[prompt.namespace], prompt, end)

    def __len__(self) -> int:
        return len(self.trees)

    def _add(self, space: Space, parent: int, prompt: Prompt, block_end: int) -> int:
        """Adds the block of a prompt that goes on from `parent`."""
        first = self._blocks.end(parent)
        names = [
            prompt.chain.prefix_hash(min(page + PAGE_TOKENS, block_end))
            for page in range(first, block_end, PAGE_TOKENS)
        ]
        # Of both orders: a block that only Redis knew has pages in common just as well.
        siblings, _ = self._blocks.nearest(parent, prompt, first, block_end)
        content = Content(prompt.codes(first, block_end), block_end - first)
        row = self.trees.add(space, parent, names, content, siblings)
        self._blocks.note_state(row, prompt.state_at(block_end))
        return row

    def _adopt(self, row: int, prompt: Prompt, first: int, shared: int) -> None:
        """Knows a foreign block by its tokens, if a prompt has them all."""
        if self._blocks.foreign[row] and self._blocks.lengths[row] == shared:
            self._blocks.adopt(row, prompt.codes(first, first + shared))
            self._blocks.note_state(row, prompt.state_at(first + shared))

    def _known(self, space: Space, prompt: Prompt, end: int) -> int:
        """The block of a prompt that ends at a token; known by its tokens from here on."""
        if not end:
            return space.root
        row = space.blocks.get(prompt.chain.prefix_hash(end), NONE)
        at = row
        while at != NONE and self._blocks.foreign[at]:
            self._blocks.adopt(at, prompt.codes(self._blocks.firsts[at], self._blocks.end(at)))
            at = self._blocks.parents[at]
        return row


def _block_end(end_token: int, back: int) -> int:
    """Where a block of a prefix ends, so many blocks before its last."""
    return min(end_token, (-(-end_token // KV_BLOCK_TOKENS) - back) * KV_BLOCK_TOKENS)
