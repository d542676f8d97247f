"""How much of the pool all readers together may pin."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class PinBudget:
    """Bytes that windows in flight may hold, so that stalled readers leave room for puts.

    A reader waits for one window at a time, and for none while it holds one, so a wait ends when
    some reader goes on, and at the latest when a stalled one is cut off. What it has ahead of that
    it takes only if there is plenty.

    Args:
        most_bytes: in all; a single window that is larger is let through alone.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # Guarded by _changed: bytes of the windows in flight.
        self._changed = threading.Condition()
        self._held_bytes = 0

    @contextmanager
    def hold(self, size: int, timeout_s: float) -> Iterator[bool]:
        """Holds `size` bytes for the block; False when they were not to be had in time."""
        with self._changed:
            granted = self._changed.wait_for(lambda: self._fits(size), timeout_s)
            self._held_bytes += size if granted else 0
        try:
            yield granted
        finally:
            if granted:
                self.release(size)

    def take(self, size: int) -> bool:
        """Takes `size` bytes at once, if half of all bytes is left then; False if not."""
        with self._changed:
            granted = self._held_bytes + size <= self._most_bytes // 2
            self._held_bytes += size if granted else 0
        return granted

    def release(self, size: int) -> None:
        """Gives back what `take` took."""
        with self._changed:
            self._held_bytes -= size
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._held_bytes or self._held_bytes + size <= self._most_bytes
