"""Read locks on objects in the pool, and how many bytes they keep there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lmcache.v1.distributed.api import ObjectKey

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


class PinBooks:
    """Which pins are held, and the bytes they hold. Thread-safe."""

    def __init__(self) -> None:
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
