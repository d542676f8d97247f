"""How much of the pool all readers together may pin."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class PinBudget:
    """Bytes that windows in flight may hold, so that stalled readers leave room for puts.

    A reader waits for one window at a time, and for none while it holds one, so a wait ends when
    some reader goes on, and at the latest when a stalled one is cut off. What it has ahead of that
    it takes only if there is plenty, and lets go of before it waits.

    Args:
        most_bytes: in all; a single window that is larger is let through alone.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # Guarded by _changed: bytes of the windows in flight.
        self._changed = threading.Condition()
        self._held_bytes = 0

    @contextmanager
    def hold(
        self, size: int, timeout_s: float, before_waiting: Callable[[], None] = lambda: None
    ) -> Iterator[bool]:
        """Holds `size` bytes for the block; False when they were not to be had in time.

        Args:
            size: bytes.
            timeout_s: longest wait.
            before_waiting: releases what the reader took ahead, if they are not there at once.
        """
        granted = self._try(size)
        if not granted:
            before_waiting()
            with self._changed:
                granted = self._changed.wait_for(lambda: self._try(size), timeout_s)
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

    def _try(self, size: int) -> bool:
        with self._changed:
            fits = not self._held_bytes or self._held_bytes + size <= self._most_bytes
            self._held_bytes += size if fits else 0
        return fits
