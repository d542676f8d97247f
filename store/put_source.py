"""Where the bytes of a Put come from: a gRPC stream, a lane's socket, or a staging segment."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from tailreplay.store.errors import InvalidRequest
from tailreplay.store.lane_wire import LaneRecord, Pace, RecordKind, receive, receive_into, send

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tailreplay.proto import store_pb2 as pb
    from tailreplay.store.staging import Staging

OFFSET = struct.Struct("<Q")
INLINE = (1 << 64) - 1
"""In place of an offset: the object's bytes follow on the socket."""

_SCRATCH_BYTES = 1 << 20
_TAKEN = LaneRecord(RecordKind.TAKEN).pack()


class PutSource(Protocol):
    """Gives the wanted objects of one Put, in order."""

    def take(self, view: memoryview) -> None:
        """Fills `view` with the next object.

        Raises:
            InvalidRequest: its place is outside the staging segment.
            StoreUnavailable: the stream ends before it is there.
            OSError: the stream breaks, or its sender is too slow.
        """

    def skip(self, size: int) -> None:
        """Passes over the next object, which has `size` bytes.

        Raises:
            StoreUnavailable: the stream ends before it is over.
            OSError: the stream breaks, or its sender is too slow.
        """


class SocketSource:
    """Objects that are sent.

    Args:
        sock: where they come.
        pace: how slowly they may.
    """

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._pace = sock, pace

    def take(self, view: memoryview) -> None:
        """As in `PutSource`."""
        receive_into(self._sock, [view], self._pace)

    def skip(self, size: int) -> None:
        """As in `PutSource`."""
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            self.take(scratch[: min(size, len(scratch))])
            size -= min(size, len(scratch))


class StagedSource:
    """Objects that lie in a staging segment; the writer is told of each that it may go.

    Args:
        sock: where their places come.
        pace: how slowly they may.
        staging: the segment.
    """

    def __init__(self, sock: socket.socket, pace: Pace, staging: Staging) -> None:
        self._sock, self._pace, self._staging = sock, pace, staging
        self._sent = SocketSource(sock, pace)

    def take(self, view: memoryview) -> None:
        """As in `PutSource`."""
        offset = self._offset()
        if offset == INLINE:
            self._sent.take(view)
        else:
            self._staging.copy_out(offset, view)
            self._pace.note(0.0, len(view))
        send(self._sock, [_TAKEN])

    def skip(self, size: int) -> None:
        """As in `PutSource`."""
        if self._offset() == INLINE:
            self._sent.skip(size)
        send(self._sock, [_TAKEN])

    def _offset(self) -> int:
        offset: int = OFFSET.unpack(receive(self._sock, OFFSET.size, self._pace))[0]
        return offset


class FrameSource:
    """Objects as chunks of a gRPC stream.

    Args:
        frames: the stream; each object's chunks must be exactly its bytes.
    """

    def __init__(self, frames: Iterator[pb.PutFrame]) -> None:
        self._frames = frames

    def take(self, view: memoryview) -> None:
        """As in `PutSource`."""
        at = 0
        while at < len(view):
            chunk = _chunk(self._frames, len(view) - at)
            view[at : at + len(chunk)] = chunk
            at += len(chunk)

    def skip(self, size: int) -> None:
        """As in `PutSource`."""
        while size:
            size -= len(_chunk(self._frames, size))


def _chunk(frames: Iterator[pb.PutFrame], wanted: int) -> bytes:
    frame = next(frames, None)
    if frame is None or frame.WhichOneof("frame") != "chunk" or not frame.chunk:
        raise InvalidRequest(f"stream ends or changes while {wanted} bytes of an object are due")
    if len(frame.chunk) > wanted:
        raise InvalidRequest(f"chunk has {len(frame.chunk)} bytes, only {wanted} are due")
    return bytes(frame.chunk)
