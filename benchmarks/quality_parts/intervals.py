"""Confidence intervals, 95%."""

import math

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000
_Z = 1.96


def bootstrap_mean(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean over contexts with its percentile interval; `values` is `[contexts]`."""
    ones = np.ones_like(values)
    return bootstrap_ratio(values, ones)


def bootstrap_ratio(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Ratio of two paired means with its percentile interval; both `[contexts]`.

    Contexts are drawn, not answers: answers about one context are not independent.
    """
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(above), (_DRAWS, len(above)))
    ratios = _divided(above[drawn].sum(1), below[drawn].sum(1))
    low, high = np.nanquantile(ratios, (0.025, 0.975)) if np.isfinite(ratios).any() else (0, 0)
    return float(_divided(above.sum(), below.sum())), float(low), float(high)


def wilson(found: float, count: int) -> tuple[float, float]:
    """Interval of a share, which is of some width even where `found` is 0 or all.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    share = found / count
    centre = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _divided(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(a, b, out=np.full_like(np.asarray(a, float), np.nan), where=b != 0)
