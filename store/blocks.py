"""The blocks of all trees, one row of plain columns each, and each block's children in order.

A child is known by its tokens, when somebody stored it through this store, or by its running
digests alone, when it was read of in Redis. Each kind is kept sorted by its own keys, and the
longest common prefix of a sequence with a sorted set is with one of its two neighbours there: so a
search costs O(log children). Most blocks have one child or none, which needs no list.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.chain import DIGEST_BYTES, STATE_BYTES, common_tokens
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS
from tailreplay.store.placement import SEGMENT_TOKENS
from tailreplay.store.prompt import code_bytes, common_codes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailreplay.store.prompt import Prompt

NONE = -1
_MANY = -2
PAGES = KV_BLOCK_TOKENS // PAGE_TOKENS
_MORE_ROWS = 32
"""Rows by which the columns grow."""
_TIES = 8
"""Siblings on each side that are looked at for one that shares as many tokens and has KV."""


class _Children(NamedTuple):
    """Rows of the children of one block, sorted by their keys."""

    known: list[int]
    foreign: list[int]


class Blocks:
    """The rows. A block is called by its row, which another gets once it is removed.

    Attributes:
        parents: the block before it; NONE for the root of a namespace.
        spaces: number of its namespace.
        firsts: position of its first token.
        lengths: tokens it has.
        foreign: 1 = known by digests alone.
        keys: codes of its tokens, or their running digests if it is foreign.
        kv: row of its `kv` object; NONE for a root.
        pages: rows of its `hidden` objects, PAGES each, NONE after the last.
        heads: the first block of its segment; a root is its own.
    """

    def __init__(self) -> None:
        self.parents = array("i")
        self.spaces = array("i")
        self.firsts = array("i")
        self.lengths = array("H")
        self.foreign = array("B")
        self.keys: list[bytes] = []
        self.kv = array("i")
        self.pages = array("i")
        self.heads = array("i")
        self._states = bytearray()
        self._child = array("i")
        self._many: dict[int, _Children] = {}
        self._free: list[int] = []

    def add(
        self, parent: int, space: int, first: int, length: int, key: bytes, foreign: int
    ) -> int:
        """A new block; listed below its parent if that is not NONE."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.parents[row], self.spaces[row], self.firsts[row] = parent, space, first
        self.heads[row] = self.heads[parent] if first % SEGMENT_TOKENS else row
        self.lengths[row], self.foreign[row], self.keys[row] = length, foreign, key
        if parent != NONE:
            self._list(row)
        return row

    def remove(self, row: int) -> None:
        """Takes a block without children away."""
        if self.parents[row] != NONE:
            self._unlist(row)
        self.kv[row] = NONE
        self.pages[row * PAGES : (row + 1) * PAGES] = array("i", [NONE] * PAGES)
        self.keys[row] = b""
        self.note_state(row, bytes(STATE_BYTES))
        self._free.append(row)

    def _grow(self) -> None:
        """Makes free rows, many at a time."""
        rows, more = len(self.keys), range(_MORE_ROWS)
        for column in (self.parents, self.spaces, self.firsts, self.kv, self.heads, self._child):
            column.extend(NONE for _ in more)
        self.lengths.frombytes(bytes(self.lengths.itemsize * _MORE_ROWS))
        self.foreign.frombytes(bytes(_MORE_ROWS))
        self.pages.extend(NONE for _ in range(PAGES * _MORE_ROWS))
        self.keys += [b""] * _MORE_ROWS
        self._states += bytes(STATE_BYTES * _MORE_ROWS)
        self._free += reversed(range(rows, rows + _MORE_ROWS))

    def adopt(self, row: int, codes: bytes) -> None:
        """Knows a foreign block by its tokens from here on."""
        self._unlist(row)
        self.keys[row], self.foreign[row] = codes, 0
        self._list(row)

    def note_state(self, row: int, state: bytes) -> None:
        """Keeps what running digests behind a block go on from; nothing is kept of nothing."""
        if state:
            self._states[row * STATE_BYTES : (row + 1) * STATE_BYTES] = state

    def state(self, row: int) -> bytes:
        """What running digests behind a block go on from; empty if it is not known."""
        state = bytes(self._states[row * STATE_BYTES : (row + 1) * STATE_BYTES])
        return state if any(state) else b""

    def end(self, row: int) -> int:
        """One past the position of its last token."""
        return self.firsts[row] + self.lengths[row]

    def has_children(self, row: int) -> bool:
        """Whether a block hangs below it."""
        return self._child[row] != NONE

    def children(self, row: int) -> Iterator[int]:
        """Its children, those known by tokens first."""
        known, foreign = self._children(row)
        yield from known
        yield from foreign

    def known_children(self, row: int) -> list[int]:
        """Its children that are known by tokens, in order; not to be changed."""
        return self._children(row).known

    def groups(self, known: list[int], within: range, tokens: int) -> Iterator[range]:
        """Places among children known by tokens, cut up where they differ in so many first ones.

        Args:
            known: as of `known_children`.
            within: which of them.
            tokens: a shorter child stands alone.
        """
        at = within.start
        while at < within.stop:
            key, end = self.keys[known[at]], at + 1
            if self.lengths[known[at]] >= tokens:
                cut = code_bytes(key, tokens)
                end = bisect_right(
                    known, key[:cut], end, within.stop, key=lambda row: self.keys[row][:cut]
                )
            yield range(at, end)
            at = end

    def exact(self, parent: int, prompt: Prompt, first: int, end: int) -> int:
        """The child that is exactly tokens [first, end) of a prompt; NONE."""
        child = self._child[parent]
        if child >= 0:
            return child if self.keys[child] == self._key(child, prompt, first, end) else NONE
        if child == NONE:
            return NONE
        for children in self._many[parent]:
            if children:
                key = self._key(children[0], prompt, first, end)
                at = self._place(children, key)
                if at < len(children) and self.keys[children[at]] == key:
                    return children[at]
        return NONE

    def nearest(self, parent: int, prompt: Prompt, first: int, end: int) -> tuple[list[int], int]:
        """Children that share most leading tokens with [first, end), and how many they share.

        Those that share equally many lie side by side in each order; some of them are given.
        """
        if self._child[parent] == NONE:
            return [], 0
        best, found = 1, list[int]()
        for children in self._children(parent):
            shared, tied = self._nearest(children, prompt, first, end)
            if shared > best:
                best, found = shared, tied
            elif shared == best:
                found += tied
        return found, best if found else 0

    def beside(self, row: int) -> Iterator[int]:
        """Its neighbours among its siblings: those that share most with it, in its own order."""
        if self._is_only(row):
            return
        children = self._own(row)
        at = self._place(children, self.keys[row])
        if at:
            yield children[at - 1]
        if at + 1 < len(children):
            yield children[at + 1]

    def around(self, row: int) -> Iterator[Sequence[int]]:
        """Its siblings: those after it and those before it, nearest first, then the other order."""
        known, foreign = self._children(self.parents[row])
        own, others = (foreign, known) if self.foreign[row] else (known, foreign)
        at = self._place(own, self.keys[row])
        yield own[at + 1 :]
        yield own[:at][::-1]
        yield others

    def before(self, row: int) -> int:
        """The longest shorter sibling that a block begins with, in the same order; NONE.

        Sorted order puts it anywhere before, with other extensions between, so its own extensions
        are skipped back over; at most one step per shorter length.
        """
        if self._is_only(row):
            return NONE
        key, children = self.keys[row], self._own(row)
        foreign = self.foreign[row]
        shared_of = common_tokens if foreign else common_codes
        at = self._place(children, key)
        while at:
            at -= 1
            other = self.keys[children[at]]
            if key.startswith(other):
                return children[at]
            shared = shared_of(other, key)
            if not shared:
                return NONE
            wanted = key[: shared * DIGEST_BYTES if foreign else code_bytes(key, shared)]
            at = bisect_left(children, wanted, 0, at, key=self.keys.__getitem__)
            if self.keys[children[at]] == wanted:
                return children[at]
        return NONE

    def _nearest(
        self, children: list[int], prompt: Prompt, first: int, end: int
    ) -> tuple[int, list[int]]:
        if not children:
            return 0, []
        foreign = self.foreign[children[0]]
        shared_of = common_tokens if foreign else common_codes
        key = self._key(children[0], prompt, first, end)
        at = self._place(children, key)
        around = children[max(at - 1, 0) : at + 1]
        shared = max(shared_of(self.keys[child], key) for child in around)
        if not shared:
            return 0, []
        prefix = self._key(children[0], prompt, first, first + shared)
        near = children[max(at - _TIES, 0) : at + _TIES]
        return shared, [child for child in near if self.keys[child].startswith(prefix)]

    def _key(self, like: int, prompt: Prompt, first: int, end: int) -> bytes:
        """What a block of these tokens would be called in the order that `like` is in."""
        return prompt.digests_of(first, end) if self.foreign[like] else prompt.codes(first, end)

    def _place(self, children: Sequence[int], key: bytes) -> int:
        return bisect_left(children, key, key=self.keys.__getitem__)

    def _is_only(self, row: int) -> bool:
        """Whether it is its parent's one child."""
        return self._child[self.parents[row]] == row

    def _own(self, row: int) -> list[int]:
        return self._children(self.parents[row])[self.foreign[row]]

    def _children(self, row: int) -> _Children:
        child = self._child[row]
        if child == NONE:
            return _Children([], [])
        if child == _MANY:
            return self._many[row]
        return _Children([], [child]) if self.foreign[child] else _Children([child], [])

    def _list(self, row: int) -> None:
        parent = self.parents[row]
        if self._child[parent] == NONE:
            self._child[parent] = row
            return
        if self._child[parent] >= 0:
            self._many[parent] = self._children(parent)
            self._child[parent] = _MANY
        children = self._many[parent][self.foreign[row]]
        children.insert(self._place(children, self.keys[row]), row)

    def _unlist(self, row: int) -> None:
        parent = self.parents[row]
        if self._child[parent] == row:
            self._child[parent] = NONE
            return
        children = self._many[parent][self.foreign[row]]
        del children[self._place(children, self.keys[row])]
        known, foreign = self._many[parent]
        if len(known) + len(foreign) == 1:
            self._child[parent] = (known or foreign)[0]
            del self._many[parent]
