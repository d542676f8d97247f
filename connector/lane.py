"""The data lane's client: rows straight into the engine's buffers, objects straight out of them.

On the store's own machine rows are not sent at all: the store says where in its shared segment they
lie, pinned, and they are copied from there, once.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import grpc
import numpy as np

from tailreplay.connector.staging import StagingRing
from tailreplay.connector.step import Step
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c_of
from tailreplay.store.copying import copy_rows
from tailreplay.store.errors import (
    IntegrityError,
    StoreUnavailable,
    from_status,
)
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    PLACED,
    RECORD_BYTES,
    REQUEST,
    STAGED,
    VERSION,
    LaneRecord,
    RecordKind,
    Request,
    connect,
    hang_up,
    receive,
    receive_into,
    send,
    unpack_record,
)
from tailreplay.store.put_source import INLINE, OFFSET

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from tailreplay.connector.breaker import Breaker
    from tailreplay.connector.client import ObjectBytes

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0
_RETRY_S = 5.0
_MAX_ERROR_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 15
_SEEN = REQUEST.pack(Request.SEEN, 0, 0, 0)


class LaneSocket:
    """One open lane; one request at a time.

    Attributes:
        segment: the store's shared memory, read-only; None where it is another machine's.
    """

    def __init__(self, sock: socket.socket, segment: mmap.mmap | None) -> None:
        self.sock = sock
        self.segment = segment
        # Read, and not looked at yet; nothing once a request is over.
        self._ahead, self._at = b"", 0
        self._asked = False
        self._staging: StagingRing | None = None
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)

    def is_closed(self) -> bool:
        """Whether the store has closed the other end, even if unread records lie before that."""
        return bool(self._hung_up.poll(0))

    def request(self, kind: Request, message: pb.FetchRequest | pb.PutPlan, flags: int = 0) -> None:
        """Sends a request."""
        data = message.SerializeToString()
        send(self.sock, [REQUEST.pack(kind, flags, 0, len(data)), data])

    def put(self, begin: pb.PutBegin, objects: Sequence[ObjectBytes]) -> pb.PutResponse:
        """Stores objects; those that the store does not want are not packed."""
        if self.segment is not None and not self._asked:
            self._asked, self._staging = True, self._stage()
        plan = pb.PutPlan(begin=begin, objects=[item.announce for item in objects])
        self.request(Request.PUT, plan, STAGED if self._staging is not None else 0)
        wanted = receive(self.sock, self._expect(RecordKind.WANTED, len(objects)))
        for item, is_wanted in zip(objects, wanted, strict=True):
            if not is_wanted:
                continue
            if self._staging is None:
                send(self.sock, item.parts)
            else:
                self._place(self._staging, item)
        while self._staging:
            self._taken(self._staging)
        return pb.PutResponse.FromString(
            receive(self.sock, self._expect(RecordKind.DONE, _MAX_ANSWER_BYTES))
        )

    def _stage(self) -> StagingRing | None:
        """A staging segment of the store's; None where it gives none."""
        self.sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
        data, descriptors, _, _ = socket.recv_fds(self.sock, RECORD_BYTES, 1)
        try:
            data += receive(self.sock, RECORD_BYTES - len(data))
            record = unpack_record(data)
            if record.kind is not RecordKind.SEGMENT or not record.offset or not descriptors:
                return None
            return StagingRing(mmap.mmap(descriptors[0], record.offset))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _place(self, staging: StagingRing, item: ObjectBytes) -> None:
        parts = item.parts
        if sum(memoryview(part).nbytes for part in parts) > staging.size_bytes:
            send(self.sock, [OFFSET.pack(INLINE), *parts])
            self._expect_all_taken(staging)
            return
        while (offset := staging.place(parts)) is None:
            self._taken(staging)
        self.sock.sendall(OFFSET.pack(offset))

    def _expect_all_taken(self, staging: StagingRing) -> None:
        """Waits for what is placed, and for one object that was sent behind it."""
        while staging:
            self._taken(staging)
        self._expect(RecordKind.TAKEN, 0)

    def _taken(self, staging: StagingRing) -> None:
        self._expect(RecordKind.TAKEN, 0)
        staging.taken()

    def record(self, *, ahead: bool = False) -> LaneRecord:
        """The next record; an ERROR is raised as what it stands for.

        Args:
            ahead: whether what follows it may be read with it, since records alone follow.
        """
        record = unpack_record(self._read(RECORD_BYTES, ahead))
        if record.kind is RecordKind.ERROR:
            text = self._read(min(record.offset, _MAX_ERROR_BYTES), ahead).decode()
            raise from_status(record.code, text)
        return record

    def read_into(self, parts: Sequence[memoryview]) -> None:
        """Fills buffers, in order, with what follows the last record."""
        for part in parts:
            some = self._ahead[self._at : self._at + len(part)]
            part[: len(some)] = some
            self._at += len(some)
            receive_into(self.sock, [part[len(some) :]])

    def _read(self, size: int, ahead: bool) -> bytes:
        if not ahead:
            return receive(self.sock, size)
        while len(self._ahead) - self._at < size:
            self._ahead, self._at = self._ahead[self._at :], 0
            more = self.sock.recv(_AHEAD_BYTES)
            if not more:
                raise StoreUnavailable("the lane was closed in the middle of a message")
            self._ahead += more
        self._at += size
        return self._ahead[self._at - size : self._at]

    def _expect(self, kind: RecordKind, most: int) -> int:
        record = self.record()
        if record.kind is not kind or record.offset > most:
            raise StoreUnavailable(
                f"the lane says {record.kind.name} of {record.offset} bytes, wanted {kind.name} "
                f"of at most {most}"
            )
        return record.offset

    def close(self) -> None:
        """Closes it; a thread that waits on it wakes up."""
        hang_up(self.sock)
        self.sock.close()


class Lanes:
    """Lanes to one store: idle ones are used again, more are opened as needed. Thread-safe.

    Args:
        address: the store's gRPC address.
        open_lane: asks for a ticket, and raises grpc.RpcError; None = no lanes.
        tls: for a lane over TCP; None = in the clear.
    """

    def __init__(
        self,
        address: str,
        open_lane: Callable[[], pb.OpenLaneResponse] | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._open_lane = open_lane
        # Guarded by _lock: lanes nobody uses, when to try to open one again after a failure, the
        # mapped segment with its device and inode, and whether all of it is over.
        self._lock = threading.Lock()
        self._idle: list[LaneSocket] = []
        self._retry_at_s = 0.0
        self._segment: tuple[tuple[int, int], mmap.mmap] | None = None
        self._closed = False

    def take(self) -> LaneSocket | None:
        """A lane for one request; None when there is none to be had, and gRPC must do."""
        while True:
            with self._lock:
                lane = self._idle.pop() if self._idle else None
            if lane is None:
                return self._open()
            if not lane.is_closed():
                return lane
            lane.close()

    def give_back(self, lane: LaneSocket) -> None:
        """Takes a lane back whose request is over."""
        with self._lock:
            if not self._closed:
                self._idle.append(lane)
                return
        lane.close()

    def fetch(
        self, request: pb.FetchRequest, breaker: Breaker, timeout_s: float
    ) -> LaneStream | None:
        """Starts a fetch; None when there is no lane.

        Args:
            request: what is wanted.
            breaker: told how it went.
            timeout_s: longest wait for the next bytes.
        """
        lane = self.take()
        if lane is None:
            return None
        try:
            lane.sock.settimeout(timeout_s)
            lane.request(Request.FETCH, request, PLACED if lane.segment is not None else 0)
        except OSError:
            lane.close()
            return None
        return LaneStream(self, lane, breaker)

    def put(
        self, begin: pb.PutBegin, objects: Sequence[ObjectBytes], timeout_s: float
    ) -> pb.PutResponse | None:
        """Stores objects of one prefix, packing only those the store wants; None without a lane.

        Raises:
            TailReplayError: the store refuses an object.
        """
        lane = self.take()
        if lane is None:
            return None
        try:
            lane.sock.settimeout(timeout_s)
            answer = lane.put(begin, objects)
        except (OSError, StoreUnavailable) as error:
            lane.close()
            logger.debug("a data lane broke, gRPC instead: %s", error)
            return None
        except BaseException:
            lane.close()
            raise
        self.give_back(lane)
        return answer

    def close(self) -> None:
        """Closes the idle lanes; those in use are closed when they are given back."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for lane in idle:
            lane.close()

    def _open(self) -> LaneSocket | None:
        with self._lock:
            too_early = time.monotonic() < self._retry_at_s
        if self._open_lane is None or too_early:
            return None
        try:
            answer = self._open_lane()
            return LaneSocket(self._greet(answer), self._map(answer))
        except (grpc.RpcError, OSError, StoreUnavailable) as error:
            logger.debug("no data lane to %s, gRPC instead: %s", self._address, error)
            with self._lock:
                self._retry_at_s = time.monotonic() + _RETRY_S
            return None

    def _greet(self, answer: pb.OpenLaneResponse) -> socket.socket:
        sock = connect(self._lane_address(answer.address), _CONNECT_S, self._tls)
        try:
            sock.sendall(HELLO.pack(MAGIC, VERSION, 0, answer.ticket))
            receive(sock, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def _lane_address(self, given: str) -> str:
        if given.startswith(":"):
            return self._address.rpartition(":")[0] + given
        return given

    def _map(self, answer: pb.OpenLaneResponse) -> mmap.mmap | None:
        """The store's segment, where a Unix socket says that it is this machine's."""
        if not self._address.startswith("unix:"):
            return None
        try:
            fd = os.open(answer.segment, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            stat = os.fstat(fd)
            with self._lock:
                if self._segment is None or self._segment[0] != (stat.st_dev, stat.st_ino):
                    mapped = mmap.mmap(
                        fd, stat.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ
                    )
                    self._segment = ((stat.st_dev, stat.st_ino), mapped)
                return self._segment[1]
        finally:
            os.close(fd)


class LaneStream:
    """Steps of one fetch over a lane, in order. One thread iterates; any thread may cancel."""

    def __init__(self, lanes: Lanes, lane: LaneSocket, breaker: Breaker) -> None:
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
                self._lane.sock.close()

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
        parts = _contiguous(rows)
        if self._lane.segment is None:
            receive_into(self._lane.sock, parts)
        else:
            self._lane.read_into(parts)
        if crc32c_of(parts) != record.crc32c:
            raise IntegrityError(f"rows from {record.first_token} are damaged")

    def _copy(self, record: LaneRecord, rows: npt.NDArray[np.uint8]) -> None:
        """Copies placed rows; they count once their range has ended on a lane that is open."""
        segment = self._lane.segment
        unit_bytes = record.rows * record.row_bytes
        end = record.offset + (record.units - 1) * record.stride + unit_bytes
        if segment is None or end > len(segment) or record.stride < unit_bytes:
            raise IntegrityError(f"rows from {record.first_token} lie outside the shared segment")
        copy_rows(rows, segment, record.offset, record.stride)

    def _check_pinned(self) -> None:
        """Placed rows that were copied so far were pinned all the while, or this raises.

        The store closes the lane before it gives a pin back, so a lane that is open after the
        copying means that nothing was overwritten under it.
        """
        if self._lane.segment is not None and self._lane.is_closed():
            raise StoreUnavailable("the store took its memory back while it was read")


def _contiguous(rows: npt.NDArray[np.uint8]) -> list[memoryview]:
    """The memory of `[units, rows, row bytes]`, in pieces that are contiguous."""
    if rows.flags.c_contiguous:
        return [rows.reshape(-1).data]
    return [unit.reshape(-1).data for unit in rows]
