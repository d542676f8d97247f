"""One fetch over a data lane: rows received, or copied from where the store has them pinned."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from tailreplay.connector.step import Step
from tailreplay.store.copying import copy_rows
from tailreplay.store.errors import IntegrityError, StoreUnavailable
from tailreplay.store.lane_wire import (
    REQUEST,
    LaneRecord,
    RecordKind,
    Request,
    hang_up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from tailreplay.connector.breaker import Breaker
    from tailreplay.connector.lane import Lanes
    from tailreplay.connector.lane_socket import LaneSocket
    from tailreplay.connector.step import ReportDamage

_SEEN = REQUEST.pack(Request.SEEN, 0, 0, 0)


class LaneStream:
    """Steps of one fetch over a lane, in order. One thread iterates; any thread may cancel.

    Args:
        lanes: get the lane back when all has come.
        lane: on which the fetch was asked for.
        breaker: told how it went.
        report_damage: as the attribute.

    Attributes:
        report_damage: says of which object rows came damaged.
    """

    def __init__(
        self, lanes: Lanes, lane: LaneSocket, breaker: Breaker, report_damage: ReportDamage
    ) -> None:
        self.report_damage = report_damage
        self._lanes = lanes
        self._lane = lane
        self._breaker = breaker
        # Guarded by _lock: whether somebody reads, and whether it was cancelled.
        self._lock = threading.Lock()
        self._is_read = False
        self._cancelled = False

    def __iter__(self) -> Iterator[Step]:
        """The steps.

        Raises:
            TailReplayError: the lane broke; what came before is good.
        """
        with self._lock:
            self._is_read = True
        try:
            yield from self._steps()
        except (OSError, StoreUnavailable) as error:
            if not self._let_go():
                self._breaker.failed()
            self._lane.close()
            raise StoreUnavailable(f"a data lane broke: {error}") from error
        except BaseException:
            self._let_go()
            self._lane.close()
            raise
        self._breaker.succeeded()
        if self._let_go():
            self._lane.close()
        else:
            if self._lane.segment is not None:
                self._lane.segment.unlock()
            self._lanes.give_back(self._lane)

    def _let_go(self) -> bool:
        """From now on `cancel` leaves the lane, which others may use, alone; was it cancelled?"""
        with self._lock:
            was_cancelled, self._cancelled = self._cancelled, True
        return was_cancelled

    def cancel(self) -> None:
        """Ends the stream; the store gives its pins back. Does nothing to one that has ended."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            hang_up(self._lane.sock)
            if not self._is_read:
                self._lane.close()

    def stalled(self) -> None:
        """Counts against the store that nothing has come for too long."""
        self._breaker.failed()

    def _steps(self) -> Iterator[Step]:
        placed = self._lane.segment is not None
        while (record := self._lane.record(ahead=placed)).kind is not RecordKind.DONE:
            if record.kind is RecordKind.ROWS:
                yield Step(record, partial(self._receive, record))
            elif record.kind is RecordKind.PLACED_ROWS:
                yield Step(record._replace(kind=RecordKind.ROWS), partial(self._copy, record))
            elif record.kind is RecordKind.BARRIER:
                self._lane.sock.sendall(_SEEN)
            else:
                self._check_pinned()
                yield Step(record)

    def _receive(self, record: LaneRecord, rows: npt.NDArray[np.uint8]) -> None:
        try:
            crc = self._lane.rows(rows)
        except (OSError, StoreUnavailable) as error:
            if not self._let_go():
                self._breaker.failed()
            raise StoreUnavailable(f"a data lane broke: {error}") from error
        if crc != record.crc32c:
            raise IntegrityError(f"rows from {record.first_token} are damaged")

    def _copy(self, record: LaneRecord, rows: npt.NDArray[np.uint8]) -> None:
        """Copies placed rows; they count once their range has ended on a lane that is open."""
        segment = self._lane.segment.memory if self._lane.segment is not None else None
        unit_bytes = record.rows * record.row_bytes
        end = record.offset + (record.units - 1) * record.stride + unit_bytes
        if segment is None or end > len(segment) or record.stride < unit_bytes:
            raise IntegrityError(
                f"rows from {record.first_token} lie up to {end}, {record.stride} bytes apart, "
                f"wanted {0 if segment is None else len(segment)} at most and {unit_bytes} at least"
            )
        copy_rows(rows, segment, record.offset, record.stride)

    def _check_pinned(self) -> None:
        """Placed rows that were copied so far were pinned all the while, or this raises.

        The store closes the lane before it gives a pin back, so a lane that is open after the
        copying means that nothing was overwritten under it. A store that is killed gives nothing
        back: its successor does, and not while the segment is locked.
        """
        if self._lane.segment is not None and self._lane.is_closed():
            raise StoreUnavailable("the store took its memory back while it was read")
