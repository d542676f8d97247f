"""Which rows have come, against a map of every row."""

import random

import numpy as np
import pytest

from tailreplay.connector.coverage import Coverage


def frames(units, rows, draw):
    """Frames that cover a range once, in a store's order: (unit, units, row, rows)."""
    row = 0
    while row < rows:
        size = min(draw.randint(1, 5), rows - row)
        step = draw.randint(1, units)
        for unit in range(0, units, step):
            yield unit, min(step, units - unit), row, size
        row += size


@pytest.mark.parametrize("seed", range(200))
def test_it_says_what_a_map_would(seed):
    draw = random.Random(seed)
    units, rows = draw.randint(1, 5), draw.randint(1, 30)
    coming = list(frames(units, rows, draw))
    if seed % 3 == 1:
        draw.shuffle(coming)
    if seed % 3 == 2:
        at = draw.randrange(len(coming))
        unit, row = draw.randrange(units), draw.randrange(rows)
        strange = unit, draw.randint(1, units - unit), row, draw.randint(1, rows - row)
        coming[at : at + draw.randint(0, 1)] = [strange]
    came, there = Coverage(units, rows), np.zeros((units, rows), bool)
    for unit, n, row, size in coming:
        assert came.is_empty == (not there.any())
        here = there[unit : unit + n, row : row + size]
        assert came.add(unit, n, row, size) == (not here.any())
        if here.any():
            return
        here[...] = True
        assert came.is_complete == there.all()


def test_rows_in_order_need_no_map():
    came = Coverage(32, 1 << 14)
    for row in range(0, 1 << 14, 256):
        for unit in range(0, 32, 8):
            assert came.add(unit, 8, row, 256)
    assert came.is_complete
    assert came._map is None
    assert not came.add(31, 1, 5, 1)
