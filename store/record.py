"""Objects the index knows, one row of plain columns each, and the handles that code works with.

A store lists millions of objects. As Python objects they cost 450 bytes each and are walked by
every collection of garbage; as rows they cost 62 and are not. A `Record` is made when somebody asks
for an object, is the same one for all who hold it at a time, and reads and writes its row. Once the
row is given up the record stands alone: it has its name, exists nowhere, and never becomes another
object.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from tailreplay.store.objects import Kind, ObjectName, Provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

IN_CPU = 1
IN_REDIS = 2
APPROXIMATE = 4
FETCHED = 8
FETCHED_AGAIN = 16
EXISTS = IN_CPU | IN_REDIS

_NAME_BYTES = 32

_MORE_ROWS = 128
"""Rows by which the columns grow."""


class Record:
    """One object the index knows.

    Args:
        name: its key in every tier.
        first_token: position of its first row.
        rows: rows it has.
        size: bytes with header; 0 until it has been stored.
        digest: running digest of a checkpoint's last token; empty for other kinds.
    """

    __slots__ = (
        "__weakref__",
        "_objects",
        "_row",
        "_size",
        "digest",
        "first_token",
        "name",
        "rows",
    )

    def __init__(
        self, name: ObjectName, first_token: int, rows: int, *, size: int = 0, digest: bytes = b""
    ) -> None:
        self.name = name
        self.first_token = first_token
        self.rows = rows
        self.digest = digest
        self._size = size
        self._objects: Objects | None = None
        self._row = -1

    @property
    def row(self) -> int:
        """Its row; -1 once the index has forgotten it."""
        return self._row if self._objects is not None else -1

    @property
    def is_listed(self) -> bool:
        """Whether the index still knows it."""
        return self._objects is not None

    @property
    def end_token(self) -> int:
        """One past its last row."""
        return self.first_token + self.rows

    @property
    def size(self) -> int:
        """Bytes with header; 0 until it has been stored."""
        return self._size if self._objects is None else self._objects.sizes[self._row]

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        if self._objects is not None:
            self._objects.sizes[self._row] = size

    @property
    def exists(self) -> bool:
        """Whether any tier has it."""
        return bool(self._state & EXISTS)

    @property
    def in_cpu(self) -> bool:
        """Whether the CPU tier has it."""
        return bool(self._state & IN_CPU)

    @in_cpu.setter
    def in_cpu(self, value: bool) -> None:
        self._set(IN_CPU, value)

    @property
    def in_redis(self) -> bool:
        """Whether Redis has it, manifest included."""
        return bool(self._state & IN_REDIS)

    @in_redis.setter
    def in_redis(self, value: bool) -> None:
        self._set(IN_REDIS, value)

    @property
    def provenance(self) -> Provenance:
        """Exact or approximate."""
        return Provenance.APPROXIMATE if self._state & APPROXIMATE else Provenance.EXACT

    @provenance.setter
    def provenance(self, value: Provenance) -> None:
        self._set(APPROXIMATE, value is Provenance.APPROXIMATE)

    @property
    def redis_until_s(self) -> int:
        """When its manifest expires, on the store's clock, if Redis has it."""
        return 0 if self._objects is None else self._objects.untils[self._row]

    @redis_until_s.setter
    def redis_until_s(self, until_s: float) -> None:
        if self._objects is not None:
            self._objects.untils[self._row] = int(until_s)

    @property
    def fetches(self) -> int:
        """How often a reader has asked for it: 0, 1, or 2 for more."""
        state = self._state
        return bool(state & FETCHED) + bool(state & FETCHED_AGAIN)

    def note_fetch(self) -> None:
        """Counts a reader."""
        self._set(FETCHED_AGAIN if self._state & FETCHED else FETCHED, True)

    @property
    def tail_figures(self) -> bytes:
        """Of a hidden page, how long a tail must be that ends in it; may be empty."""
        return b"" if self._objects is None else self._objects.figures(self._row)

    @tail_figures.setter
    def tail_figures(self, figures: bytes) -> None:
        if self._objects is not None:
            self._objects.note_figures(self._row, figures)

    @property
    def _state(self) -> int:
        return 0 if self._objects is None else self._objects.states[self._row]

    def _set(self, bit: int, value: bool) -> None:
        if self._objects is not None:
            states = self._objects.states
            states[self._row] = states[self._row] | bit if value else states[self._row] & ~bit

    def __repr__(self) -> str:
        return f"Record({self.name.kind.name} [{self.first_token}, {self.end_token}))"


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
        states: IN_CPU, IN_REDIS, APPROXIMATE, FETCHED, FETCHED_AGAIN.
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
        """A new row, with one use."""
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
            record._size = self.sizes[row]
            record._objects = None
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
            )
            record._objects, record._row = self, row
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
