"""A running load: one thread reads the stream into buffers, the engine waits range by range."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import (
    GeometryMismatch,
    IntegrityError,
    InvalidRequest,
    TailReplayError,
)
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from tailreplay.connector.client import FetchStream
    from tailreplay.store.chain import PrefixChain
    from tailreplay.store.geometry import Geometry

_REASONS = {
    pb.MISS_REASON_EVICTED: "evicted",
    pb.MISS_REASON_INTEGRITY: "integrity",
    pb.MISS_REASON_DEADLINE: "deadline",
}
_GRID = {Kind.KV: KV_BLOCK_TOKENS, Kind.HIDDEN: PAGE_TOKENS}


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

    Attributes:
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
    ) -> None:
        self._ranges = ranges
        self._geometry = geometry
        self._chain = chain
        self._stall_timeout_s = stall_timeout_s
        self._on_event = on_event
        self.buffers = [self._buffer(wanted) for wanted in ranges]
        # Touched by the reading thread alone: which rows of each range have come, `[units, rows]`.
        self._came = [np.zeros(buffer.shape[:2], bool) for buffer in self.buffers]
        # Guarded by _changed: what has come so far.
        self._changed = threading.Condition()
        self._stream: FetchStream | None = None
        self._cancelled = False
        self._done = [False] * len(ranges)
        self._failed: dict[int, LoadFailed] = {}
        self._over: LoadFailed | None = None
        self._frames = 0
        self._bytes: dict[tuple[str, Kind], int] = {}

    def run(self, stream: FetchStream) -> None:
        """Reads the stream to its end; called once, on a thread of its own. Never raises."""
        with self._changed:
            self._stream = stream
            cancelled = self._cancelled
        if cancelled:
            stream.cancel()
        over = LoadFailed("evicted", "the stream ended before the range was complete")
        try:
            for frame in stream:
                self._take(frame)
        except (IntegrityError, InvalidRequest, GeometryMismatch) as error:
            # A range that the store finds invalid is one of another shape than its objects.
            over = LoadFailed("integrity", str(error))
            stream.cancel()
        except TailReplayError as error:
            over = LoadFailed("store_down", str(error))
        finally:
            with self._changed:
                self._over = over
                self._changed.notify_all()

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

    def _buffer(self, wanted: pb.Range) -> npt.NDArray[np.uint8]:
        geometry = self._geometry[Kind(wanted.kind)]
        units = wanted.units or geometry.units - wanted.first_unit
        return np.empty((units, wanted.end_token - wanted.first_token, geometry.row_bytes), "u1")

    def _settled(self, number: int) -> bool:
        return self._done[number] or number in self._failed or self._over is not None

    def _take(self, frame: pb.FetchFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "rows":
            self._take_rows(frame.rows)
        elif kind == "missing":
            reason = _REASONS.get(frame.missing.reason, "evicted")
            failure = LoadFailed(reason, f"the store has no rows from {frame.missing.first_token}")
            with self._changed:
                self._failed[self._number(frame.missing.range)] = failure
        elif kind == "range_end":
            self._end(self._number(frame.range_end.range))
        with self._changed:
            self._frames += 1
            self._changed.notify_all()

    def _take_rows(self, rows: pb.Rows) -> None:
        wanted, buffer = self._check_rows(rows)
        unit, row = rows.first_unit - wanted.first_unit, rows.first_token - wanted.first_token
        here = np.s_[unit : unit + rows.units, row : row + rows.rows]
        came = self._came[rows.range]
        if came[here].any():
            raise IntegrityError(f"rows from {rows.first_token} come twice")
        first = not came.any()
        buffer[here] = np.frombuffer(rows.data, "u1").reshape(rows.units, rows.rows, rows.row_bytes)
        came[here] = True
        tier = "redis" if rows.tier == pb.TIER_REDIS else "cpu"
        with self._changed:
            key = (tier, Kind(wanted.kind))
            self._bytes[key] = self._bytes.get(key, 0) + len(rows.data)
        if first:
            self._on_event("first_rows", wanted)

    def _check_rows(self, rows: pb.Rows) -> tuple[pb.Range, npt.NDArray[np.uint8]]:
        """Refuses rows that are damaged, of another shape, or of another prefix."""
        number = self._number(rows.range)
        wanted, buffer = self._ranges[number], self.buffers[number]
        row_bytes = buffer.shape[2]
        fits = len(rows.data) == rows.units * rows.rows * row_bytes > 0
        if rows.row_bytes != row_bytes or not fits:
            raise IntegrityError(
                f"{rows.units} units of {rows.rows} rows of {rows.row_bytes} bytes in "
                f"{len(rows.data)} bytes, wanted rows of {row_bytes} bytes"
            )
        inside = (
            wanted.first_unit <= rows.first_unit
            and rows.first_unit + rows.units <= wanted.first_unit + buffer.shape[0]
            and wanted.first_token <= rows.first_token
            and rows.first_token + rows.rows <= wanted.end_token
        )
        if not inside:
            raise IntegrityError(f"rows from {rows.first_token} lie outside their range")
        if crc32c(rows.data) != rows.crc32c:
            raise IntegrityError(f"rows from {rows.first_token} are damaged")
        self._check_name(rows, wanted)
        return wanted, buffer

    def _check_name(self, rows: pb.Rows, wanted: pb.Range) -> None:
        """Objects that lie whole within the prompt must bear the name its tokens give.

        Of the block in which the match ends only the store knows the rest; its rows rest on the
        running digests.
        """
        if wanted.kind == pb.KIND_CHECKPOINT:
            end = wanted.end_token
        else:
            end = rows.first_token + rows.rows
            if end % _GRID[Kind(wanted.kind)]:
                return
        if rows.prefix_hash != self._chain.prefix_hash(end):
            raise IntegrityError(f"rows up to {end} belong to another prefix")

    def _number(self, number: int) -> int:
        if number >= len(self._ranges):
            raise IntegrityError(f"a frame of range {number}, wanted below {len(self._ranges)}")
        return number

    def _end(self, number: int) -> None:
        complete = bool(self._came[number].all())
        with self._changed:
            self._done[number] = complete
            if not complete:
                self._failed[number] = LoadFailed("integrity", f"range {number} has holes")
        self._on_event("complete", self._ranges[number])
