"""Which objects are on their way to Redis, and word to the caller of how each ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class WriteBack(Generic[K]):
    """Objects between their `begin` and the one outcome that each of them has. Thread-safe.

    Args:
        on_stored: told of objects in Redis, on a thread of its own, in the order of the outcomes.
        on_failed: told there of objects that will not get to Redis.
        unwanted: returns those of the keys just stored that must go again.
        forget: deletes those.
        places: how many places objects are written to; one that has them is enough.
    """

    def __init__(
        self,
        *,
        on_stored: Callable[[Sequence[K]], None],
        on_failed: Callable[[Sequence[K]], None],
        unwanted: Callable[[Sequence[K]], list[K]],
        forget: Callable[[Sequence[K]], None],
        places: int = 1,
    ) -> None:
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._unwanted = unwanted
        self._forget = forget
        self._places = places
        self._notices = ThreadPoolExecutor(1, "tailreplay-write-back")
        # State, under _lock: of each object that is nowhere yet its bytes, and how many places may
        # still take it.
        self._lock = threading.Lock()
        self._pending: dict[K, int] = {}
        self._left: dict[K, int] = {}

    def begin(self, key: K, size: int) -> None:
        """Expect an outcome for an object that is about to become visible."""
        with self._lock:
            self._pending[key] = size
            self._left[key] = self._places

    def pending(self) -> tuple[int, int]:
        """Return how many objects, and bytes, are on their way."""
        with self._lock:
            return len(self._pending), sum(self._pending.values())

    def stored(self, keys: Sequence[K]) -> None:
        """Take note that objects are in Redis."""
        unwanted = self._unwanted(keys)
        if unwanted:
            self._notices.submit(_call, self._forget, unwanted)
            self._settle(unwanted, self._on_failed)
        self._settle([key for key in keys if key not in unwanted], self._on_stored)

    def refused(self, keys: Sequence[K]) -> None:
        """Take note that one place will not have objects; with the last of them they failed."""
        with self._lock:
            over = []
            for key in keys:
                if key in self._left:
                    self._left[key] -= 1
                    if not self._left[key]:
                        over.append(key)
        self.failed(over)

    def withdraw(self, keys: Sequence[K]) -> list[K]:
        """End the way of objects that one place alone may still take; nobody is told of them.

        Returns:
            Those that go nowhere any more, the ones that were on no way among them.
        """
        with self._lock:
            gone = [key for key in keys if self._left.get(key, 1) == 1]
            for key in gone:
                self._pending.pop(key, None)
                self._left.pop(key, None)
        return gone

    def is_pending(self, key: K) -> bool:
        """Return whether an object has no outcome yet."""
        return key in self._pending

    def failed(self, keys: Sequence[K]) -> None:
        """Take note that objects will not get to Redis; those not on their way don't matter."""
        self._settle(keys, self._on_failed)

    def close(self) -> None:
        """Deliver what there is to tell, and stop."""
        self._notices.shutdown()

    def _settle(self, keys: Sequence[K], tell: Callable[[Sequence[K]], None]) -> None:
        with self._lock:
            settled = [key for key in keys if self._pending.pop(key, None) is not None]
            for key in settled:
                del self._left[key]
        if settled:
            self._notices.submit(_call, tell, settled)


def _call(tell: Callable[[Sequence[K]], None], keys: Sequence[K]) -> None:
    try:
        tell(keys)
    except Exception:
        logger.exception("a caller failed to take note of a write-back")
