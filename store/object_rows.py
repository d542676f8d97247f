"""Objects the index knows, one row of plain columns each.

A store lists millions of objects. As Python objects they cost 450 bytes each and are walked by
every collection of garbage; as rows they cost 62 and are not.

Nothing here locks: the index is used under the catalog's lock.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.record import EXISTS, IN_REDIS, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_NAME_BYTES = 32

_MORE_ROWS = 128
"""Rows by which the columns grow."""


class _Figures:
    """Strings of one length, back to back; each has a place until it is taken out."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._bytes = bytearray()
        self._free: list[int] = []

    def add(self, figures: bytes) -> int:
        if not self._free:
            self._bytes += figures
            return len(self._bytes) // self._width - 1
        place = self._free.pop()
        self._bytes[place * self._width : (place + 1) * self._width] = figures
        return place

    def at(self, place: int) -> bytes:
        return bytes(self._bytes[place * self._width : (place + 1) * self._width])

    def remove(self, place: int) -> None:
        self._free.append(place)


class Objects:
    """The rows. Columns are public to the index alone.

    Attributes:
        kinds: kind; 0 = the row is free.
        states: bits of `record.py`: IN_CPU, IN_REDIS, APPROXIMATE, FETCHED, FETCHED_AGAIN.
        sizes: bytes with header.
        homes: row of the block that the object belongs to, one of them if it belongs to several;
            for a checkpoint the block before the one in which its prefix ends.
        uses: blocks that list it; siblings share the hidden pages they have in common.
        firsts: position of its first row.
        lengths: rows it has.
        untils: when its manifest expires, in seconds of the store's clock.
    """

    def __init__(self) -> None:
        self.kinds = array("B")
        self.states = array("B")
        self.sizes = array("q")
        self.homes = array("i")
        self.uses = array("i")
        self.firsts = array("i")
        self.lengths = array("H")
        self.untils = array("I")
        self._figure_bytes = array("B")
        self._figure_places = array("i")
        self._columns = (
            self.kinds,
            self.states,
            self.sizes,
            self.homes,
            self.uses,
            self.firsts,
            self.lengths,
            self.untils,
            self._figure_bytes,
            self._figure_places,
        )
        self._names = bytearray()
        self._digests: dict[int, bytes] = {}
        self._placed_by: dict[int, bytes] = {}
        self._figures: dict[int, _Figures] = {}
        self._free: list[int] = []
        self._live: WeakValueDictionary[int, Record] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self.kinds) - len(self._free)

    def add(self, kind: Kind, name: bytes, first: int, length: int, home: int) -> int:
        """A new row, with one use.

        Args:
            kind: of the object.
            name: hash of its prefix, 32 bytes.
            first: position of its first row.
            length: rows it has.
            home: as in `homes`.
        """
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.kinds[row], self.states[row], self.sizes[row] = kind, 0, 0
        self.homes[row], self.uses[row], self.untils[row] = home, 1, 0
        self.firsts[row], self.lengths[row] = first, length
        self._names[row * _NAME_BYTES : (row + 1) * _NAME_BYTES] = name
        return row

    def _grow(self) -> None:
        """Makes free rows, many at a time: a column grows as fast by a hundred as by one."""
        rows = len(self.kinds)
        for column in self._columns:
            column.frombytes(bytes(column.itemsize * _MORE_ROWS))
        self._names += bytes(_NAME_BYTES * _MORE_ROWS)
        self._free += reversed(range(rows, rows + _MORE_ROWS))

    def free(self, row: int) -> None:
        """Gives a row up; its record stands alone from here on."""
        record = self._live.pop(row, None)
        if record is not None:
            record.stand_alone()
        self.kinds[row] = self.states[row] = 0
        self._digests.pop(row, None)
        self._placed_by.pop(row, None)
        self.note_figures(row, b"")
        self._free.append(row)

    def name(self, row: int) -> bytes:
        """Prefix hash of a row's object."""
        return bytes(self._names[row * _NAME_BYTES : (row + 1) * _NAME_BYTES])

    def note_digest(self, row: int, digest: bytes) -> None:
        """Keeps the digest of a checkpoint's last token."""
        self._digests[row] = digest

    def digest(self, row: int) -> bytes:
        """What `note_digest` has kept; empty for other rows."""
        return self._digests.get(row, b"")

    def note_placed_by(self, row: int, prefix_hash: bytes) -> None:
        """Keeps what a row is placed by that is not placed with its home."""
        self._placed_by[row] = prefix_hash

    def placed_by(self, row: int) -> bytes:
        """What `note_placed_by` has kept; empty for other rows."""
        return self._placed_by.get(row, b"")

    def figures(self, row: int) -> bytes:
        """Tail figures of a row; may be empty."""
        size = self._figure_bytes[row]
        return self._figures[size].at(self._figure_places[row]) if size else b""

    def note_figures(self, row: int, figures: bytes) -> None:
        """Keeps tail figures, in place of those before."""
        if size := self._figure_bytes[row]:
            self._figures[size].remove(self._figure_places[row])
        self._figure_bytes[row] = len(figures)
        if figures:
            kept = self._figures.setdefault(len(figures), _Figures(len(figures)))
            self._figure_places[row] = kept.add(figures)

    def record(self, row: int, namespace: bytes, placed_by: bytes) -> Record:
        """The one record of a row."""
        record = self._live.get(row)
        if record is None:
            name = ObjectName(namespace, Kind(self.kinds[row]), self.name(row), placed_by)
            record = Record(
                name,
                self.firsts[row],
                self.lengths[row],
                size=self.sizes[row],
                digest=self.digest(row),
                place=(self, row),
            )
            self._live[row] = record
        return record

    def rows(self) -> Iterator[int]:
        """Every row in use."""
        return (row for row, kind in enumerate(self.kinds) if kind)

    def expired(
        self, now_s: float, first: int, count: int, *, most: int, only_redis: bool
    ) -> tuple[list[int], int]:
        """Rows of objects in Redis whose manifest has expired, and the row to go on from; 0 = end.

        Args:
            now_s: on the store's clock.
            first: row to begin with.
            count: rows to look at.
            most: rows to return.
            only_redis: leave out those that the CPU tier has too.
        """
        end = min(first + count, len(self.kinds))
        states = np.frombuffer(self.states, np.uint8)[first:end]
        untils = np.frombuffer(self.untils, np.uint32)[first:end]
        asked = EXISTS if only_redis else IN_REDIS
        rows = np.flatnonzero((states & asked == IN_REDIS) & (untils <= now_s)) + first
        if len(rows) > most:
            rows, end = rows[:most], int(rows[most])
        return rows.tolist(), end if end < len(self.kinds) else 0

    def expiries(self, sample: int) -> npt.NDArray[np.uint32]:
        """When manifests of objects that only Redis has expire; of about `sample` rows."""
        step = max(1, len(self.kinds) // sample)
        states = np.frombuffer(self.states, np.uint8)[::step]
        untils = np.frombuffer(self.untils, np.uint32)[::step]
        found: npt.NDArray[np.uint32] = untils[states & EXISTS == IN_REDIS]
        return found
