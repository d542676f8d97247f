"""Rows in use out of the GPU tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SLOT_BYTES = 1 << 14
"""Unit of the pool's memory; an object wastes half of one on average."""


class DeviceRows:
    """Objects of one shape, one behind the other, that stay in the pool until they are released.

    Args:
        memory: the pool's, `[slots, SLOT_BYTES]` uint8.
        slots: of each object, `[objects, slots]` int64 on the device.
        shape: units, rows and bytes a row of each.
        release: called once.
    """

    def __init__(
        self,
        memory: Tensor,
        slots: Tensor,
        shape: tuple[int, int, int],
        release: Callable[[], None],
    ) -> None:
        self._memory, self._slots, self._shape = memory, slots, shape
        self._release: Callable[[], None] | None = release

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one unit."""
        return self._shape[2]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._slots) * self._shape[1]

    def rows(self, units: slice, first: int, end: int) -> Tensor:
        """Rows [first, end) of some units, copied: `[units, rows, row bytes]` uint8."""
        _, rows, width = self._shape
        objects = self._slots[first // rows : -(-end // rows)]
        start, stop = units.start * rows * width, units.stop * rows * width
        slot = start // SLOT_BYTES
        taken = self._memory[objects[:, slot : -(-stop // SLOT_BYTES)]].flatten(1)
        own = taken[:, start - slot * SLOT_BYTES : stop - slot * SLOT_BYTES]
        whole = own.view(len(own), -1, rows, width).transpose(0, 1).flatten(1, 2)
        skipped = first // rows * rows
        return whole[:, first - skipped : end - skipped]

    def release(self) -> None:
        """Lets the pool have them back; nothing may be read any more."""
        if self._release is not None:
            self._release()
        self._release = None
