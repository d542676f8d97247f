"""What is to be done on one Redis server, and in which order."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

FLIGHT_BYTES = 4 << 20
"""Most that one connection asks for at once, unless one value is more."""


class Outcome(enum.Enum):
    """What became of a load."""

    LOADED = enum.auto()
    ABSENT = enum.auto()
    """The server does not have it."""
    DAMAGED = enum.auto()
    """What the server had was wrong, and is deleted."""
    AWAY = enum.auto()
    """The server did not answer, or not in time."""
    CANCELLED = enum.auto()
    """Nobody wanted it any more."""


class Priority(enum.IntEnum):
    """What goes first."""

    URGENT_LOAD = 0
    LOAD = 1
    STORE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Read the payload under `key` into `into`, which may hold rubbish unless it is LOADED."""

    key: bytes
    into: memoryview
    urgent: bool
    done: Callable[[Outcome], None]

    @property
    def priority(self) -> Priority:
        """When it is its turn."""
        return Priority.URGENT_LOAD if self.urgent else Priority.LOAD


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Write `payload` under `key`."""

    key: bytes
    payload: memoryview
    done: Callable[[bool], None]

    @property
    def priority(self) -> Priority:
        """When it is its turn."""
        return Priority.STORE


Job = Load | Store


class JobQueue:
    """Jobs by priority, then by age. Not thread-safe."""

    def __init__(self) -> None:
        self._sequence = itertools.count()
        self._jobs: list[tuple[Priority, int, Job]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Queue a job."""
        heapq.heappush(self._jobs, (job.priority, next(self._sequence), job))

    def has(self, last: Priority) -> bool:
        """Say whether there is a job of priority `last` or before it."""
        return bool(self._jobs) and self._jobs[0][0] <= last

    def take(self) -> list[Job]:
        """Take the first job, with the loads that go out together with it; one at least is there.

        Those have its priority, and not more than FLIGHT_BYTES with it.
        """
        priority, _, job = heapq.heappop(self._jobs)
        taken = [job]
        if isinstance(job, Load):
            room = FLIGHT_BYTES - len(job.into)
            while (load := self._next_load(priority)) is not None and len(load.into) <= room:
                heapq.heappop(self._jobs)
                taken.append(load)
                room -= len(load.into)
        return taken

    def remove_loads(self, which: Callable[[Load], bool]) -> list[Load]:
        """Take some loads out, wherever they stand."""
        gone = [job for _, _, job in self._jobs if isinstance(job, Load) and which(job)]
        self._remove(gone)
        return gone

    def stores_among(self, some: Collection[Store]) -> list[Store]:
        """Say which of some stores are queued."""
        return [job for _, _, job in self._jobs if isinstance(job, Store) and job in some]

    def remove_stores(self, some: Collection[Store]) -> list[Store]:
        """Take out those of some stores that are queued."""
        gone = self.stores_among(some)
        self._remove(gone)
        return gone

    def _remove(self, gone: Collection[Job]) -> None:
        if gone:
            out = set(gone)
            self._jobs = [entry for entry in self._jobs if entry[2] not in out]
            heapq.heapify(self._jobs)

    def _next_load(self, priority: Priority) -> Load | None:
        if not self.has(priority):
            return None
        job = self._jobs[0][2]
        return job if isinstance(job, Load) else None
