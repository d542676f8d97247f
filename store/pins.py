"""Read locks on objects in the pool, and how many bytes they keep there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.doomed import Doomed
from tailreplay.store.lmcache_l1 import pool_view
from tailreplay.store.misses import Miss
from tailreplay.store.objects import ObjectName

Source = Literal["cpu", "redis"]


@dataclass(slots=True, eq=False)
class Pinned:
    """A read lock on one object in the pool.

    Attributes:
        name: the object.
        data: its bytes, read-only, in pool memory: valid until `Tiers.unpin`.
        source: where the bytes were found.
        pool_offset: where `data` starts in the segment at `Tiers.shm_path`.
        key: LMCache's key for the object.
        pool_bytes: what it takes of the pool, alignment included.
    """

    name: ObjectName
    data: memoryview = field(repr=False)
    source: Source
    pool_offset: int
    key: ObjectKey = field(repr=False)
    pool_bytes: int = field(repr=False)


class Pins:
    """Makes pins, and knows which are held, and the bytes they hold. Thread-safe.

    Args:
        l1: the pool.
        doomed: what is deleted; no pin is made of it.
    """

    def __init__(self, l1: L1Manager, doomed: Doomed) -> None:
        self._l1 = l1
        self._doomed = doomed
        self._view = pool_view(l1).toreadonly()
        # State, under _lock: pins that are held, how many each object has, and their bytes.
        self._lock = threading.Lock()
        self._held: set[Pinned] = set()
        self._pins: dict[ObjectKey, int] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pool that pins keep from eviction; an object counts once."""
        with self._lock:
            return self._bytes

    def hold(
        self,
        name: ObjectName,
        size: int,
        key: ObjectKey,
        source: Source,
        memory: MemoryObj,
    ) -> Pinned | Miss:
        """Make a pin of a read lock on `memory`, or let go of it when it is not what is wanted.

        It is not on the books yet: many are taken there at once, by `add`.

        Args:
            name: of the object.
            size: bytes that it must have.
            key: LMCache's for it.
            source: where it was found.
            memory: what is locked.

        Returns:
            The pin, or why there is none.
        """
        miss = self._doomed.why(key)
        if miss is None and memory.get_size() != size:
            miss = Miss.ABSENT
        if miss is not None:
            self._l1.finish_read([key])
            return miss
        meta = memory.meta
        data = self._view[meta.address : meta.address + size]
        return Pinned(name, data, source, meta.address, key, meta.phy_size)

    def add(self, pins: Iterable[Pinned]) -> None:
        """Take pins on the books."""
        with self._lock:
            for pinned in pins:
                self._held.add(pinned)
                count = self._pins.get(pinned.key, 0)
                self._bytes += 0 if count else pinned.pool_bytes
                self._pins[pinned.key] = count + 1

    def remove(self, pins: Iterable[Pinned]) -> list[ObjectKey]:
        """Take pins off the books; returns the keys of those that were not taken off before."""
        removed: list[ObjectKey] = []
        with self._lock:
            for pinned in pins:
                if pinned not in self._held:
                    continue
                self._held.remove(pinned)
                self._pins[pinned.key] -= 1
                if not self._pins[pinned.key]:
                    del self._pins[pinned.key]
                    self._bytes -= pinned.pool_bytes
                removed.append(pinned.key)
        return removed
