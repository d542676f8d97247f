"""A running load: one thread reads the stream into buffers, the engine waits range by range."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from tailreplay.connector.coverage import Coverage
from tailreplay.connector.report import why_missed
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import (
    GeometryMismatch,
    IntegrityError,
    InvalidRequest,
    TailReplayError,
)
from tailreplay.store.lane_wire import LaneRecord, RecordKind
from tailreplay.store.objects import BLOCK_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from tailreplay.connector.fetch_stream import FetchStream
    from tailreplay.connector.lane_stream import LaneStream
    from tailreplay.connector.step import Step
    from tailreplay.store.chain import PrefixChain
    from tailreplay.store.geometry import Geometry

_REASONS = {
    pb.MISS_REASON_EVICTED: "evicted",
    pb.MISS_REASON_INTEGRITY: "integrity",
    pb.MISS_REASON_DEADLINE: "deadline",
    pb.MISS_REASON_NO_ROOM: "no_room",
}


def fresh(shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Memory for a range, not touched before."""
    return np.empty(shape, np.uint8)


class LoadFailed(Exception):
    """A range did not come. `reason` is one of the report's reasons for lost tokens."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Load:
    """Reads a Fetch stream into one buffer per range.

    Args:
        ranges: what was asked for.
        geometry: what objects of each kind must look like.
        chain: names that whole objects of the prompt must have.
        stall_timeout_s: longest pause between frames.
        on_event: called with (name, range) from the reading thread, at each range's first row and
            at its end.
        allocate: gives a range's buffer for its shape; fresh memory costs as much to touch as the
            rows to copy, so who loads often hands out memory that was used before.

    Attributes:
        ranges: what was asked for.
        buffers: per range `[units, rows, row bytes]` uint8; filled when `wait` returns for it.
    """

    def __init__(
        self,
        ranges: Sequence[pb.Range],
        geometry: Mapping[Kind, Geometry],
        chain: PrefixChain,
        *,
        stall_timeout_s: float,
        on_event: Callable[[str, pb.Range], None],
        allocate: Callable[[tuple[int, int, int]], npt.NDArray[np.uint8]] = fresh,
    ) -> None:
        self.ranges = ranges
        self._geometry = geometry
        self._chain = chain
        self._stall_timeout_s = stall_timeout_s
        self._on_event = on_event
        self.buffers = [allocate(self._shape(wanted)) for wanted in ranges]
        # Touched by the reading thread alone: which rows of each range have come, and of which
        # object some came damaged.
        self._came = [Coverage(*buffer.shape[:2]) for buffer in self.buffers]
        self._damaged: tuple[Kind, bytes] | None = None
        # Guarded by _changed: what has come so far.
        self._changed = threading.Condition()
        self._stream: FetchStream | LaneStream | None = None
        self._cancelled = False
        self._done = [False] * len(ranges)
        self._failed: dict[int, LoadFailed] = {}
        self._over: LoadFailed | None = None
        self._frames = 0
        self._bytes: dict[tuple[str, Kind], int] = {}
        self._started_s: float | None = None
        self._ended_s: float | None = None

    @property
    def size_bytes(self) -> int:
        """Payload bytes of all ranges."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def seconds(self) -> float:
        """How long the stream has been read, up to its end; 0 before that begins."""
        with self._changed:
            if self._started_s is None:
                return 0.0
            return (self._ended_s or time.perf_counter()) - self._started_s

    def run(self, stream: FetchStream | LaneStream) -> None:
        """Reads the stream to its end; called once, on a thread of its own. Never raises."""
        with self._changed:
            self._started_s = time.perf_counter()
            self._stream = stream
            cancelled = self._cancelled
        if cancelled:
            stream.cancel()
        over = LoadFailed("evicted", "the stream ended before the range was complete")
        try:
            for step in stream:
                self._take(step)
        except (IntegrityError, InvalidRequest, GeometryMismatch) as error:
            # A range that the store finds invalid is one of another shape than its objects.
            over = LoadFailed("integrity", str(error))
            stream.cancel()
        except TailReplayError as error:
            over = LoadFailed(why_missed(error), str(error))
        finally:
            with self._changed:
                self._over = over
                self._ended_s = time.perf_counter()
                self._changed.notify_all()
        # Behind that, since nobody waits for it.
        if self._damaged is not None:
            stream.report_damage(*self._damaged)

    def wait(self, number: int) -> npt.NDArray[np.uint8]:
        """Blocks until a range is complete; returns its buffer.

        Raises:
            LoadFailed: it will not come, or nothing has come for `stall_timeout_s`.
        """
        with self._changed:
            while not self._done[number]:
                failure = self._failed.get(number) or self._over
                if failure is not None:
                    raise failure
                seen = self._frames
                self._changed.wait(self._stall_timeout_s)
                if self._frames == seen and not self._settled(number):
                    if self._stream is not None:
                        self._stream.stalled()
                    raise LoadFailed("deadline", f"nothing came for {self._stall_timeout_s} s")
        return self.buffers[number]

    def cancel(self) -> None:
        """Ends the load; ranges that are not complete fail."""
        with self._changed:
            self._cancelled = True
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def bytes_by_tier(self) -> dict[tuple[str, Kind], int]:
        """Payload bytes that have come so far, by tier ('cpu', 'redis') and kind."""
        with self._changed:
            return dict(self._bytes)

    def _shape(self, wanted: pb.Range) -> tuple[int, int, int]:
        geometry = self._geometry[Kind(wanted.kind)]
        units = wanted.units or geometry.units - wanted.first_unit
        return units, wanted.end_token - wanted.first_token, geometry.row_bytes

    def _settled(self, number: int) -> bool:
        return self._done[number] or number in self._failed or self._over is not None

    def _take(self, step: Step) -> None:
        record = step.record
        if record.kind is RecordKind.ROWS and step.fill is not None:
            self._take_rows(record, step.fill)
        elif record.kind is RecordKind.MISSING:
            reason = _REASONS.get(pb.MissReason.ValueType(record.code), "evicted")
            failure = LoadFailed(reason, f"the store has no rows from {record.first_token}")
            with self._changed:
                self._failed[self._number(record.number)] = failure
        elif record.kind is RecordKind.RANGE_END:
            self._end(self._number(record.number))
        with self._changed:
            self._frames += 1
            self._changed.notify_all()

    def _take_rows(self, rows: LaneRecord, fill: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        wanted, buffer = self._check_rows(rows)
        unit, row = rows.first_unit - wanted.first_unit, rows.first_token - wanted.first_token
        came = self._came[rows.number]
        first = came.is_empty
        if not came.add(unit, rows.units, row, rows.rows):
            raise IntegrityError(f"rows from {rows.first_token} come twice")
        try:
            fill(buffer[unit : unit + rows.units, row : row + rows.rows])
        except IntegrityError:
            self._damaged = (Kind(wanted.kind), rows.prefix_hash)
            raise
        tier = "redis" if rows.tier == pb.TIER_REDIS else "cpu"
        with self._changed:
            key = (tier, Kind(wanted.kind))
            size = rows.units * rows.rows * rows.row_bytes
            self._bytes[key] = self._bytes.get(key, 0) + size
        if first:
            self._on_event("first_rows", wanted)

    def _check_rows(self, rows: LaneRecord) -> tuple[pb.Range, npt.NDArray[np.uint8]]:
        """Refuses rows of another shape or of another prefix."""
        number = self._number(rows.number)
        wanted, buffer = self.ranges[number], self.buffers[number]
        if rows.row_bytes != buffer.shape[2] or not rows.units or not rows.rows:
            raise IntegrityError(
                f"{rows.units} units of {rows.rows} rows of {rows.row_bytes} bytes, wanted rows "
                f"of {buffer.shape[2]} bytes"
            )
        inside = (
            wanted.first_unit <= rows.first_unit
            and rows.first_unit + rows.units <= wanted.first_unit + buffer.shape[0]
            and wanted.first_token <= rows.first_token
            and rows.first_token + rows.rows <= wanted.end_token
        )
        if not inside:
            raise IntegrityError(
                f"{rows.rows} rows from {rows.first_token} of {rows.units} units from "
                f"{rows.first_unit}, wanted tokens [{wanted.first_token}, {wanted.end_token}) of "
                f"{buffer.shape[0]} units from {wanted.first_unit}"
            )
        self._check_name(rows, wanted)
        return wanted, buffer

    def _check_name(self, rows: LaneRecord, wanted: pb.Range) -> None:
        """Objects that lie whole within the prompt must bear the name its tokens give.

        Of the block in which the match ends only the store knows the rest; its rows rest on the
        running digests.
        """
        end = rows.first_token + rows.rows
        if end % BLOCK_TOKENS[Kind(wanted.kind)]:
            return
        if rows.prefix_hash != self._chain.prefix_hash(end):
            raise IntegrityError(f"rows up to {end} belong to another prefix")

    def _number(self, number: int) -> int:
        if number >= len(self.ranges):
            raise IntegrityError(f"a frame of range {number}, wanted below {len(self.ranges)}")
        return number

    def _end(self, number: int) -> None:
        complete = self._came[number].is_complete
        with self._changed:
            self._done[number] = complete
            if not complete:
                self._failed[number] = LoadFailed("integrity", f"range {number} has holes")
        self._on_event("complete", self.ranges[number])
