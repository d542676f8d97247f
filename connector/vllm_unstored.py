"""Prompts that stay unstored: counted by reason, and a fault of ours told once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class Unstored:
    """Counts what was to be stored and was not. Thread-safe."""

    def __init__(self) -> None:
        # Guarded by _lock: counts since they were last taken, and faults that are in the log.
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()

    def count(self, reason: str) -> None:
        """Counts one prompt."""
        with self._lock:
            self._counts[reason] += 1

    @contextmanager
    def guarded(self, what: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Ends with a count where what is inside raises: the engine does not need it.

        The traceback is logged the first time.

        Args:
            what: what has failed then, for the log.
            then: called after a failure.
        """
        try:
            yield
        except Exception:
            self.count("fault")
            with self._lock:
                is_new = what not in self._told
                self._told.add(what)
            if is_new:
                logger.exception("%s; when it happens again it is only counted", what)
            else:
                logger.debug("%s", what, exc_info=True)
            then()

    def take(self) -> dict[str, int]:
        """Counts since the last call, by reason."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)
