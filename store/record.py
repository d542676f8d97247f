"""The handles of objects that the index knows, with which all else works.

A `Record` is made when somebody asks for an object, is the same one for all who hold it at a time,
and reads and writes the object's row (`object_rows.py`). Once the row is given up the record stands
alone: it has its name, exists nowhere, and never becomes another object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.objects import Provenance

if TYPE_CHECKING:
    from tailreplay.store.object_rows import Objects
    from tailreplay.store.objects import ObjectName

IN_CPU = 1
IN_REDIS = 2
APPROXIMATE = 4
FETCHED = 8
FETCHED_AGAIN = 16
EXISTS = IN_CPU | IN_REDIS


class Record:
    """One object the index knows.

    Args:
        name: its key in every tier.
        first_token: position of its first row.
        rows: rows it has.
        size: bytes with header; 0 until it has been stored.
        digest: running digest of a checkpoint's last token; empty for other kinds.
        place: the rows that have it, and which it is; None = it stands alone.
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
        self,
        name: ObjectName,
        first_token: int,
        rows: int,
        *,
        size: int = 0,
        digest: bytes = b"",
        place: tuple[Objects, int] | None = None,
    ) -> None:
        self.name = name
        self.first_token = first_token
        self.rows = rows
        self.digest = digest
        self._size = size
        self._objects: Objects | None = place[0] if place else None
        self._row = place[1] if place else -1

    def stand_alone(self) -> None:
        """Keeps what it is, and has no row any more; called when that is given up."""
        self._size, self._objects = self.size, None

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
