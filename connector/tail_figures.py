"""Tail figures as the index keeps them: how long a tail must be, by replay group and error budget.

For each replay group three u16, in tokens, for the budgets of `replay.tail_error.BUDGETS`; 0 is not
known, 65535 that many or more. docs/format.md has the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tailreplay.store.objects import MAX_TAIL_FIGURES_BYTES, TAIL_FIGURE_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

BUDGETS = (0.3, 0.1, 0.03)
"""As `replay.tail_error.BUDGETS`; repeated, since planning needs no torch."""

_MOST = 65535


def pack(tails: npt.NDArray[np.int64]) -> bytes:
    """Figures from tails `[groups, budgets]`; of more groups than fit only the longest."""
    if tails.shape[0] * TAIL_FIGURE_BYTES > MAX_TAIL_FIGURES_BYTES:
        tails = np.where((tails > 0).all(0), tails.max(0), 0)[None]
    return np.minimum(tails, _MOST).astype("<u2").tobytes()


def unpack(figures: bytes) -> npt.NDArray[np.int64]:
    """Tails `[groups, budgets]`; none where there are no figures."""
    return np.frombuffer(figures, "<u2").reshape(-1, len(BUDGETS)).astype(np.int64)


def are_figures(figures: bytes) -> bool:
    """Whether bytes of a store can be figures; of no group there are none."""
    return len(figures) % TAIL_FIGURE_BYTES == 0 and len(figures) <= MAX_TAIL_FIGURES_BYTES


def tails_within(figures: bytes, error_budget: float) -> tuple[int, ...] | None:
    """Tail of each group that keeps to a budget; None when that is not known."""
    affordable = [i for i, budget in enumerate(BUDGETS) if budget <= error_budget]
    if not figures or not affordable:
        return None
    tails: list[int] = unpack(figures)[:, affordable[0]].tolist()
    known = all(0 < tail < _MOST for tail in tails)
    return tuple(tails) if known else None
