"""Holds bulk transfers up while urgent ones are under way.

What is urgent holds bulk up when it begins, and not for long: a stream of hiddens to somebody who
takes them slowly is no reason to let others wait. And however much is urgent, bulk has half of the
time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

HOLD_S = 0.05
"""Longest that one urgent thing holds bulk up, and that bulk is held up before it has its turn."""


class UrgentGate:
    """Makes bulk wait for urgent work, for half of the time at most. Thread-safe.

    Args:
        hold_s: how long bulk is held up at a time.
        clock: seconds that only grow; stepped by tests.
    """

    def __init__(self, hold_s: float = HOLD_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._hold_s = hold_s
        self._clock = clock
        # State, under _calm: urgent work under way, since when there is any, and when the last of
        # it began. The count is read without the lock by those who have nothing to wait for.
        self._calm = threading.Condition()
        self._urgent = 0
        self._since_s = 0.0
        self._last_s = 0.0

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """Do something urgent."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin something urgent."""
        with self._calm:
            self._last_s = self._clock()
            if not self._urgent:
                self._since_s = self._last_s
            self._urgent += 1

    def leave(self) -> None:
        """End it."""
        with self._calm:
            self._urgent -= 1
            if not self._urgent:
                self._calm.notify_all()

    def hold_left_s(self) -> float:
        """Seconds for which bulk has to wait from now; 0 when it may go."""
        if not self._urgent:
            return 0.0
        now = self._clock()
        turn_s = (now - self._since_s) % (2 * self._hold_s)
        return max(0.0, min(self._hold_s - turn_s, self._last_s + self._hold_s - now))

    def wait(self) -> None:
        """Wait until bulk may go."""
        if not self._urgent:
            return
        with self._calm:
            while (left_s := self.hold_left_s()) > 0:
                self._calm.wait(left_s)
