"""A circuit breaker: after a few failures in a row, stop asking for a while."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Breaker:
    """Lets calls through until `max_failures` in a row, then one per `open_s` seconds.

    Args:
        name: what it guards, for the log.
        clock: seconds that only grow; stepped by tests.
        max_failures: failures in a row that open it.
        open_s: how long it stays open before it lets one call try.
        on_open: called when it opens; waits for nothing.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        *,
        max_failures: int = 3,
        open_s: float = 2.0,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._max_failures = max_failures
        self._open_s = open_s
        self._on_open = on_open
        # Guarded by _lock: failures in a row, and when the next call may try while open.
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at_s = 0.0

    def allows(self) -> bool:
        """Whether a call may be made now; an open breaker spends its one try by saying yes."""
        with self._lock:
            if self._failures < self._max_failures:
                return True
            now = self._clock()
            if now < self._retry_at_s:
                return False
            self._retry_at_s = now + self._open_s
            return True

    def succeeded(self) -> None:
        """Notes an answer; closes the breaker."""
        with self._lock:
            was_open = self._failures >= self._max_failures
            self._failures = 0
        if was_open:
            logger.warning("%s answers again", self._name)

    def failed(self) -> None:
        """Notes a failure."""
        with self._lock:
            self._failures += 1
            opened = self._failures == self._max_failures
            self._retry_at_s = self._clock() + self._open_s
        if opened:
            logger.warning(
                "%s failed %d times, asking again in %.1f s",
                self._name,
                self._max_failures,
                self._open_s,
            )
            self._on_open()
