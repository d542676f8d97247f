"""A step of an answer to a Fetch, the same whether it came through gRPC or over a data lane."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import IntegrityError
from tailreplay.store.lane_wire import LaneRecord, RecordKind

if TYPE_CHECKING:
    from tailreplay.proto import store_pb2 as pb
    from tailreplay.store.objects import Kind


ReportDamage: TypeAlias = "Callable[[Kind, bytes], object]"
"""Says of which object, by kind and prefix hash, rows came damaged."""


class Step(NamedTuple):
    """One step.

    Attributes:
        record: what it says.
        fill: writes the rows of a ROWS record into `[units, rows, row bytes]` uint8; raises
            IntegrityError for rows that are damaged.
    """

    record: LaneRecord
    fill: Callable[[npt.NDArray[np.uint8]], None] | None = None


def step_of(frame: pb.FetchFrame) -> Step:
    """A gRPC frame as the step that a data lane would give."""
    which = frame.WhichOneof("frame")
    if which == "rows":
        rows = frame.rows
        record = LaneRecord(
            RecordKind.ROWS,
            rows.range,
            tier=rows.tier,
            first_unit=rows.first_unit,
            units=rows.units,
            first_token=rows.first_token,
            rows=rows.rows,
            row_bytes=rows.row_bytes,
            prefix_hash=rows.prefix_hash,
        )
        return Step(record, partial(_fill, rows))
    if which == "missing":
        gone = frame.missing
        return Step(
            LaneRecord(
                RecordKind.MISSING, gone.range, code=gone.reason, first_token=gone.first_token
            )
        )
    if which == "range_end":
        return Step(LaneRecord(RecordKind.RANGE_END, frame.range_end.range))
    return Step(LaneRecord(RecordKind.LEASE))


def _fill(rows: pb.Rows, target: npt.NDArray[np.uint8]) -> None:
    if len(rows.data) != target.size:
        raise IntegrityError(
            f"{rows.units} units of {rows.rows} rows in {len(rows.data)} bytes, "
            f"wanted {target.size}"
        )
    if crc32c(rows.data) != rows.crc32c:
        raise IntegrityError(f"rows from {rows.first_token} are damaged")
    target[...] = np.frombuffer(rows.data, "u1").reshape(target.shape)
