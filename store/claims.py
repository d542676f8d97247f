"""Objects on their way in: claimed by whoever puts them, then written to Redis.

Nothing here does I/O or locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailreplay.store.objects import ObjectName
    from tailreplay.store.record import Record
    from tailreplay.store.views import Block


@dataclass(slots=True)
class _Pending:
    """An object on its way to Redis; committed there once it is both `written` and admitted."""

    size: int
    written: bool = False
    record: Record | None = None
    home: Block | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """An object whose payload is in Redis and whose manifest is to say so.

    Attributes:
        record: the object.
        home: the block whose manifest speaks of it.
        pending: by which `Claims.settle` knows it again.
    """

    record: Record
    home: Block
    pending: _Pending


class Claims:
    """Who brings what, and what Redis does not have yet. Not thread-safe.

    Args:
        to_redis: whether objects go on to Redis.

    Attributes:
        to_redis: the same.
    """

    def __init__(self, *, to_redis: bool) -> None:
        self.to_redis = to_redis
        self._claimed: set[ObjectName] = set()
        self._pending: dict[ObjectName, _Pending] = {}

    def __len__(self) -> int:
        """How many objects are claimed."""
        return len(self._claimed)

    def __contains__(self, name: ObjectName) -> bool:
        return name in self._claimed

    @property
    def pending_bytes(self) -> int:
        """Bytes of objects that are on their way to Redis."""
        return sum(pending.size for pending in self._pending.values())

    def namespaces(self) -> set[bytes]:
        """Namespaces of what is claimed."""
        return {name.namespace for name in self._claimed}

    def claim(self, name: ObjectName, size: int) -> None:
        """Claims an object of `size` bytes."""
        self._claimed.add(name)
        if self.to_redis:
            # Before the tiers have it, since they may report it written at once.
            self._pending[name] = _Pending(size)

    def release(self, name: ObjectName) -> None:
        """Ends a claim without an object."""
        self._claimed.discard(name)
        self._pending.pop(name, None)

    def arrive(self, name: ObjectName) -> None:
        """Ends a claim, since the object is in the CPU tier; it may still be pending."""
        self._claimed.discard(name)

    def is_on_its_way(self, name: ObjectName) -> bool:
        """Whether somebody brings an object, or it goes to Redis."""
        return name in self._claimed or name in self._pending

    def is_pending(self, name: ObjectName) -> bool:
        """Whether an object is on its way to Redis."""
        return name in self._pending

    def is_leaving(self, name: ObjectName) -> bool:
        """Whether an object is on its way to Redis, and nobody brings it anew."""
        return name in self._pending and name not in self._claimed

    def is_written(self, name: ObjectName) -> bool:
        """Whether an object that is still pending has its payload in Redis."""
        pending = self._pending.get(name)
        return pending is not None and pending.written

    def admit(self, record: Record, home: Block) -> None:
        """Notes that a pending object is listed, in a block that `home` describes."""
        pending = self._pending[record.name]
        pending.record, pending.home = record, home

    def written(self, names: Iterable[ObjectName]) -> list[ObjectName]:
        """Notes that payloads are in Redis; returns the names of those that are admitted."""
        ready = []
        for name in names:
            pending = self._pending.get(name)
            if pending is not None:
                pending.written = True
                if pending.record is not None:
                    ready.append(name)
        return ready

    def due(self, names: Iterable[ObjectName]) -> list[Due]:
        """Those that are still pending, and are admitted."""
        found = ((p.record, p.home, p) for n in names if (p := self._pending.get(n)) is not None)
        return [
            Due(record, home, pending)
            for record, home, pending in found
            if record is not None and home is not None
        ]

    def settle(self, due: Due) -> bool:
        """Notes that an object is committed; False when it is not the one that is pending now."""
        if self._pending.get(due.record.name) is not due.pending:
            return False
        del self._pending[due.record.name]
        return True

    def give_up(self, names: Iterable[ObjectName]) -> int:
        """Notes that objects will not get to Redis, or are gone; returns bytes that were to go."""
        gone = (self._pending.pop(name, None) for name in names)
        return sum(pending.size for pending in gone if pending is not None)
