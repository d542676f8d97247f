"""Which objects have been offered before: what a store that admits on second sighting asks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.store.objects import ObjectName


class Sightings:
    """Remembers the last names that were offered, some 100 bytes each. Thread-safe.

    Args:
        capacity: names remembered at least, and at most twice as many.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Guarded by _lock: names of now and of the generation before.
        self._lock = threading.Lock()
        self._now: set[int] = set()
        self._before: set[int] = set()

    def again(self, name: ObjectName) -> bool:
        """Whether an object was offered before; from now on it was.

        By a hash of 64 bits: one that collides is admitted at first sight.
        """
        sighted = hash(name)
        with self._lock:
            if sighted in self._now:
                return True
            known = sighted in self._before
            self._now.add(sighted)
            if len(self._now) >= self._capacity:
                self._before, self._now = self._now, set()
        return known
