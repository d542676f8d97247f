"""Rows copied from a strided source, with and without the compiled part."""

import random

import numpy as np
import pytest

from tailreplay.store import copying

SOURCE = np.random.default_rng(5).integers(0, 256, 9 << 20, np.uint8)


@pytest.fixture(params=["compiled", "numpy"])
def copy_rows(request, monkeypatch):
    """Both ways; the compiled one whatever the size."""
    if request.param == "numpy":
        monkeypatch.setattr(copying, "copy_units", None)
    elif copying.copy_units is None:
        pytest.skip("the compiled part was not built")
    monkeypatch.setattr(copying, "LEAST_BYTES", 0)
    return copying.copy_rows


def rows_at(shape, offset, stride):
    units, rows, row_bytes = shape
    size = rows * row_bytes
    return [SOURCE[offset + i * stride : offset + i * stride + size] for i in range(units)]


@pytest.mark.parametrize("seed", range(60))
def test_every_byte_arrives_and_none_beside_it(copy_rows, seed):
    draw = random.Random(seed)
    shape = (draw.randint(1, 5), draw.randint(1, 300), draw.choice([1, 7, 64, 1000, 4096]))
    size = shape[1] * shape[2]
    stride = size + draw.choice([0, 1, 4096])
    offset = draw.randrange(max(1, len(SOURCE) - shape[0] * stride))
    around = np.full((shape[0], shape[1] + 2, shape[2]), 0xA5, np.uint8)
    target = around[:, 1:-1]
    copy_rows(target, SOURCE.data, offset, stride)
    assert [unit.tobytes() for unit in target] == [
        r.tobytes() for r in rows_at(shape, offset, stride)
    ]
    assert (around[:, 0] == 0xA5).all()
    assert (around[:, -1] == 0xA5).all()


@pytest.mark.parametrize(
    ("offset", "stride"),
    [(len(SOURCE) - 99, 100), (-1, 100), (0, -1), (0, len(SOURCE)), (1 << 62, 1), (0, 1 << 62)],
)
def test_what_lies_outside_the_source_is_refused(copy_rows, offset, stride):
    target = np.zeros((2, 1, 100), np.uint8)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        copy_rows(target, SOURCE.data, offset, stride)
    assert not target.any()


def test_rows_that_are_no_whole_are_copied_all_the_same(copy_rows):
    around = np.zeros((2, 10, 64), np.uint8)
    copy_rows(around[:, :, 3:40], SOURCE.data, 5, 370)
    assert [u.tobytes() for u in around[:, :, 3:40]] == [
        r.tobytes() for r in rows_at((2, 10, 37), 5, 370)
    ]


def test_a_target_that_can_not_be_written_is_refused(copy_rows):
    target = np.zeros((2, 1, 100), np.uint8)
    target.setflags(write=False)
    with pytest.raises((ValueError, BufferError)):
        copy_rows(target, SOURCE.data, 0, 100)
