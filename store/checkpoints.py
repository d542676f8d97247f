"""Checkpoints of all trees, found by every prompt that begins with their prefix.

A checkpoint belongs to a prefix, not to a block: all siblings that share the prefix find it at the
block before the one in which it ends, by the codes that lead on from there, or by the digest of its
last token if it was read of in Redis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.blocks import NONE
from tailreplay.store.chain import DIGEST_BYTES
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName
from tailreplay.store.record import EXISTS

if TYPE_CHECKING:
    from tailreplay.store.object_rows import Objects
    from tailreplay.store.prompt import Prompt

_FEW = 64
"""Up to here checkpoints below a block are compared with a prompt one by one."""


@dataclass(slots=True)
class _Below:
    """Rows of the checkpoints that end in children of one block."""

    known: dict[bytes, int]
    foreign: dict[bytes, int]

    def __len__(self) -> int:
        return len(self.known) + len(self.foreign)


class Checkpoints:
    """Rows of checkpoints by the block before the one in which they end, and by name.

    Args:
        objects: has the rows.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._below: dict[int, _Below] = {}
        self._rows: dict[tuple[bytes, bytes], int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._below

    def row(self, namespace: bytes, prefix_hash: bytes) -> int:
        """The row of a checkpoint; NONE."""
        return self._rows.get((namespace, prefix_hash), NONE)

    def add(
        self, parent: int, name: ObjectName, end_token: int, digest: bytes, codes: bytes
    ) -> int:
        """The row of a checkpoint, made if it is new.

        Args:
            parent: the block before the one in which it ends.
            name: of the object; says what it is placed by where `parent` is a root.
            end_token: tokens it has seen.
            digest: running digest of the last of them.
            codes: of its tokens behind `parent`; empty when they are not known.
        """
        row = self.row(name.namespace, name.prefix_hash)
        below = self._below.setdefault(parent, _Below({}, {}))
        if row == NONE:
            row = self._objects.add(Kind.CHECKPOINT, name.prefix_hash, end_token - 1, 1, parent)
            self._objects.note_digest(row, digest)
            if end_token <= KV_BLOCK_TOKENS:
                self._objects.note_placed_by(row, name.placed_by)
            self._rows[name.namespace, name.prefix_hash] = row
            below.foreign[digest] = row
        if codes:
            self.adopt(row, codes)
        return row

    def adopt(self, row: int, codes: bytes) -> None:
        """Knows a checkpoint by the codes of its tokens from here on, whatever its digest says."""
        below, digest = self._below[self._objects.homes[row]], self._objects.digest(row)
        if below.foreign.get(digest, NONE) == row:
            below.known[codes] = below.foreign.pop(digest)

    def drop(self, row: int, name: ObjectName, digest: bytes) -> None:
        """Forgets a checkpoint."""
        parent = self._objects.homes[row]
        below = self._below[parent]
        if below.foreign.pop(digest, NONE) == NONE:
            del below.known[next(codes for codes, known in below.known.items() if known == row)]
        if not below:
            del self._below[parent]
        del self._rows[name.namespace, name.prefix_hash]
        self._objects.free(row)

    def on(self, block: int, prompt: Prompt, first: int, end: int) -> list[int]:
        """Those below a block on a prompt's tokens [first, end) that exist, ascending by token."""
        below = self._below[block]
        if len(below.known) <= _FEW:
            codes = prompt.codes(first, end)
            found = [row for key, row in below.known.items() if codes.startswith(key)]
        else:
            keys = (prompt.codes(first, at) for at in range(first + 1, end + 1))
            found = [row for key in keys if (row := below.known.get(key, NONE)) != NONE]
        if below.foreign:
            digests = prompt.digests_of(first, end)
            keys = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
            found += [row for key in keys if (row := below.foreign.get(key, NONE)) != NONE]
        existing = [row for row in found if self._objects.states[row] & EXISTS]
        return sorted(existing, key=self._objects.firsts.__getitem__)
