"""How wrong tails have really been, and what that does to the budget one may rely on."""

from __future__ import annotations

import math
import threading
from collections import deque

_KEPT = 1000
_LEAST = 20
_SHARE = 0.95


class Calibration:
    """Gathers the errors of replayed states against exact ones. Thread-safe.

    As long as 95% of the tails kept their budget the figures are believed. When fewer do, a budget
    is divided by as much as they exceeded it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock: error over budget of the last tails.
        self._ratios: deque[float] = deque(maxlen=_KEPT)

    def observe(self, budget: float, error: float) -> None:
        """Notes that a tail chosen for `budget` was off by `error`, both relative."""
        with self._lock:
            self._ratios.append(error / budget)

    def budget(self, asked: float) -> float:
        """What may be spent so that `asked` is kept."""
        with self._lock:
            ratios = sorted(self._ratios)
        if len(ratios) < _LEAST:
            return asked
        return asked / max(1.0, ratios[math.ceil(_SHARE * len(ratios)) - 1])

    def figures(self) -> dict[str, float]:
        """Tails looked at, the share of them within their budget, and the worst error over it."""
        with self._lock:
            ratios = list(self._ratios)
        within = sum(ratio <= 1 for ratio in ratios)
        return {
            "tails": len(ratios),
            "within": within / len(ratios) if ratios else 1.0,
            "worst": max(ratios, default=0.0),
        }
