"""Which rows of a range have come: none twice, and in the end all of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Coverage:
    """Rows that have come, of `units * rows`. Not thread-safe.

    As long as they come in the store's order, object by object and in each unit by unit, a position
    says it all; a map of every row is made for those that come otherwise.

    Args:
        units: of the range.
        rows: of each unit.
    """

    def __init__(self, units: int, rows: int) -> None:
        self._units, self._rows = units, rows
        # In order so far: all rows below _row, and those of `_row to _end` in units below _unit.
        self._row = self._end = self._unit = 0
        self._map: npt.NDArray[np.bool_] | None = None

    def add(self, unit: int, units: int, row: int, rows: int) -> bool:
        """Takes rows in, from `unit` and `row` on; False when some of them had come before."""
        if self._map is None and self._goes_on(unit, row, row + rows):
            self._end, self._unit = row + rows, unit + units
            if self._unit == self._units:
                self._row, self._unit = self._end, 0
            return True
        if self._map is None:
            self._map = np.zeros((self._units, self._rows), bool)
            self._map[:, : self._row] = True
            self._map[: self._unit, self._row : self._end] = True
        here = self._map[unit : unit + units, row : row + rows]
        if here.any():
            return False
        here[...] = True
        return True

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return self._map is None and not self._end

    @property
    def is_complete(self) -> bool:
        """Whether all rows have come."""
        if self._map is None:
            return self._row == self._rows
        return bool(self._map.all())

    def _goes_on(self, unit: int, row: int, end: int) -> bool:
        return (row, unit) == (self._row, self._unit) and (not unit or end == self._end)
