"""How a lane answers: rows onto its socket, or word of where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.errors import InvalidRequest
from tailreplay.store.lane_wire import (
    REQUEST,
    LaneRecord,
    Pace,
    RecordKind,
    Request,
    hang_up,
    receive,
    send,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from tailreplay.store.errors import TailReplayError
    from tailreplay.store.frames import Frame

_BATCH_BYTES = 4 << 20
_ENDS = (RecordKind.RANGE_END, RecordKind.MISSING, RecordKind.BARRIER)


def send_rows(sock: socket.socket, frames: Iterable[Frame]) -> None:
    """Sends frames, some at a time: what is sent drives all else out of the processor's cache.

    Raises:
        OSError: the lane breaks, or its client takes nothing in time.
    """
    waiting: list[bytes | memoryview] = []
    waiting_bytes = 0
    for frame in frames:
        waiting += _sent(frame)
        waiting_bytes += frame.payload_bytes
        if frame.record.kind in _ENDS or waiting_bytes >= _BATCH_BYTES:
            send(sock, waiting)
            waiting.clear()
            waiting_bytes = 0


def send_places(sock: socket.socket, frames: Iterable[Frame], stall_s: float) -> None:
    """Says where rows lie, range by range, and waits at the end of each window.

    Args:
        sock: of the lane; hung up on if anything goes wrong.
        frames: what to say; they hold pins until more is asked for.
        stall_s: longest wait for the client to have copied a window.

    Raises:
        OSError: the lane breaks, or its client takes nothing in time.
        StoreUnavailable: it is closed.
        InvalidRequest: the client says something else than SEEN.
    """
    waiting: list[bytes] = []
    for frame in frames:
        if frame.record.kind is RecordKind.LEASE:
            continue
        waiting.append(_placed(frame.record).pack())
        if frame.record.kind not in _ENDS:
            continue
        try:
            send(sock, waiting)
            if frame.record.kind is RecordKind.BARRIER:
                _wait_seen(sock, stall_s)
        except BaseException:
            # Before the pins end: a reader that finds the lane open after it has copied
            # knows that what it copied was pinned all along.
            hang_up(sock)
            raise
        waiting.clear()


def send_error(sock: socket.socket, error: TailReplayError) -> None:
    """Says why a request failed.

    Raises:
        OSError: the lane breaks, or its client takes nothing in time.
    """
    text = str(error).encode()
    code = error.code.value[0]
    send(sock, [LaneRecord(RecordKind.ERROR, code=code, offset=len(text)).pack(), text])


def _sent(frame: Frame) -> list[bytes | memoryview]:
    """A frame as it is sent, if it is."""
    record = frame.record
    if record.kind in (RecordKind.LEASE, RecordKind.BARRIER):
        return []
    if record.kind is RecordKind.ROWS:
        record = record._replace(crc32c=frame.crc32c, offset=0, stride=0)
    return [record.pack(), *frame.parts]


def _placed(record: LaneRecord) -> LaneRecord:
    if record.kind is RecordKind.ROWS:
        return record._replace(kind=RecordKind.PLACED_ROWS)
    return record


def _wait_seen(sock: socket.socket, stall_s: float) -> None:
    kind = REQUEST.unpack(receive(sock, REQUEST.size, Pace(stall_s)))[0]
    if kind != Request.SEEN:
        raise InvalidRequest(f"request type {kind} while placed rows are held, wanted SEEN")
