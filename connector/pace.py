"""How fast an engine has prefilled and loaded lately, and so whether a hit is worth its load."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from tailreplay.connector.fetch_plan import FetchPlan
from tailreplay.connector.tail_plan import HIDDEN_ROW_WORK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KEPT = 32
"""Prefills, and loads of each tier, that are looked at."""

_FORGET_S = 60.0
"""Age from which a load says nothing any more."""

_SCALE = 4
"""What is more than so many times smaller than what is expected says nothing of it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Something that was measured: when, how much it was, and how long it took."""

    at_s: float
    amount: int
    seconds: float


class Pace:
    """Expects of prefills and loads what the last ones of a like size took. One thread.

    What is not known counts as worth it, so a load is tried, and thereby measured, at least once
    in `_FORGET_S`: a link that was slow may have become fast.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefills: deque[_Seen] = deque(maxlen=_KEPT)
        self._loads: dict[str, deque[_Seen]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Notes a prefill of so many tokens, waits left out."""
        self._prefills.append(_Seen(self._clock(), tokens, seconds))

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Notes a load that is over, of which the slowest part came from `tier`."""
        self._loads[tier].append(_Seen(self._clock(), size_bytes, seconds))

    def checked(self, plan: FetchPlan, tier: str, size_bytes: int) -> FetchPlan:
        """The plan, or a miss (`not_worth`) if plain prefill is expected to take less time.

        Args:
            plan: a hit.
            tier: where the slowest part of it lies, 'cpu' or 'redis'.
            size_bytes: what is to be loaded.
        """
        since_s = self._clock() - _FORGET_S
        load_s = _expected(size_bytes, (s for s in self._loads[tier] if s.at_s >= since_s))
        prefill_s = _expected(plan.used_tokens, self._prefills)
        if load_s is None or prefill_s is None or not plan.used_tokens:
            return plan
        token_s = prefill_s / plan.used_tokens
        row_s = token_s if plan.from_tokens else token_s * HIDDEN_ROW_WORK
        # Rows are replayed while keys and values are on their way.
        hit_s = max(load_s, plan.replayed_tokens * row_s) + plan.recomputed_tokens * token_s
        if hit_s <= prefill_s:
            return plan
        lost = {**plan.lost, "not_worth": plan.used_tokens}
        return replace(FetchPlan("miss", True, plan.matched_tokens), lost=lost)


def _expected(amount: int, seen: Iterable[_Seen]) -> float | None:
    """Seconds for an amount; None where nothing of a like size, or larger, has been seen.

    What is far smaller says little: its time goes into what comes once, not into its size.
    """
    paces = [s.seconds / s.amount for s in seen if _SCALE * s.amount >= amount > 0]
    return amount * median(paces) if paces else None
