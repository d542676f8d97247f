"""Copies of rows from one stride to another, at the speed of one large copy where it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    import numpy.typing as npt

copy_units: Callable[..., None] | None
try:
    from tailreplay.store._copy import copy_units
except ImportError:  # it is built where there is a C compiler
    copy_units = None

LEAST_BYTES = 1 << 20
"""Less than that may be wanted again before it has left the cache."""


def copy_rows(
    target: npt.NDArray[np.uint8], source: mmap.mmap | memoryview, offset: int, stride: int
) -> None:
    """Fills `target` `[units, rows, row bytes]`; unit i lies at `offset + i * stride` of `source`.

    Raises:
        ValueError: it lies outside of `source`.
    """
    row_bytes = target.shape[2]
    is_whole = target.strides[1:] == (row_bytes, 1)
    if copy_units is not None and is_whole and target.nbytes >= LEAST_BYTES:
        copy_units(target, source, offset, stride)
        return
    if min(offset, stride) < 0:
        raise ValueError(f"offset {offset} and stride {stride}, wanted none below 0")
    target[...] = np.ndarray(target.shape, np.uint8, source, offset, (stride, row_bytes, 1))
