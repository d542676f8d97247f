"""The engine's side of a staging segment: where objects wait until the store has taken them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

_ALIGN = 64
_MOST_OBJECTS = 256


class StagingRing:
    """Places objects in a segment one behind the other, and from its start again. One thread.

    Args:
        memory: the segment, writable.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._next = 0
        self._placed: deque[tuple[int, int]] = deque()

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return len(self._bytes)

    def __len__(self) -> int:
        """Objects that have not been taken."""
        return len(self._placed)

    def place(self, parts: Sequence[bytes | memoryview]) -> int | None:
        """Copies an object of at most `size_bytes` there; returns where, None while it is full."""
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        start = self._next if self._next + size <= len(self._bytes) else 0
        end = start + size
        is_held = any(start < other_end and other < end for other, other_end in self._placed)
        if is_held or len(self._placed) >= _MOST_OBJECTS:
            return None
        at = start
        for view in views:
            self._bytes[at : at + len(view)] = np.frombuffer(view, np.uint8)
            at += len(view)
        self._placed.append((start, end))
        self._next = -(-end // _ALIGN) * _ALIGN
        return start

    def taken(self) -> None:
        """The object that was placed first may go."""
        self._placed.popleft()
