"""Time in tests: a clock that moves when told, and waiting for what another thread brings about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def step(self, seconds: float) -> None:
        """Lets time pass."""
        self.now_s += seconds


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Waits until a condition holds."""
    deadline_s = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "it never came about"
        pause.wait(0.005)
