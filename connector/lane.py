"""Data lanes to one store: rows straight into the engine's buffers, objects straight out of them.

On the store's own machine rows are not sent at all: the store says where in its shared segment they
lie, pinned, and they are copied from there, once.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import grpc

from tailreplay.connector.lane_socket import LaneSocket
from tailreplay.connector.lane_stream import LaneStream
from tailreplay.connector.segment import Segment
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    PLACED,
    VERSION,
    Request,
    connect,
    receive,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from tailreplay.connector.breaker import Breaker
    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.connector.step import ReportDamage

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0
_RETRY_S = 5.0


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
        self._mapped: tuple[tuple[int, int], mmap.mmap] | None = None
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
        self,
        request: pb.FetchRequest,
        breaker: Breaker,
        timeout_s: float,
        report_damage: ReportDamage,
    ) -> LaneStream | None:
        """Starts a fetch; None when there is no lane.

        Args:
            request: what is wanted.
            breaker: told how it went.
            timeout_s: longest wait for the next bytes.
            report_damage: of the stream.
        """
        lane = self.take()
        if lane is None:
            return None
        try:
            lane.sock.settimeout(timeout_s)
            if lane.segment is not None:
                lane.segment.lock()
            lane.request(Request.FETCH, request, PLACED if lane.segment is not None else 0)
        except OSError:
            lane.close()
            return None
        return LaneStream(self, lane, breaker, report_damage)

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
            self._mapped = None
        for lane in idle:
            lane.close()

    def _open(self) -> LaneSocket | None:
        with self._lock:
            too_early = time.monotonic() < self._retry_at_s
        if self._open_lane is None or too_early:
            return None
        try:
            answer = self._open_lane()
            return LaneSocket(self._greet(answer), self._segment_of(answer))
        except (grpc.RpcError, OSError, StoreUnavailable) as error:
            logger.debug("no data lane to %s, gRPC instead: %s", self._address, error)
            with self._lock:
                self._retry_at_s = time.monotonic() + _RETRY_S
                self._mapped = None  # of a store that may be gone; the next one's is another
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

    def _segment_of(self, answer: pb.OpenLaneResponse) -> Segment | None:
        """The store's segment, where a Unix socket says that it is this machine's."""
        if not self._address.startswith("unix:"):
            return None
        try:
            file = open(answer.segment, "rb", buffering=0)  # noqa: SIM115 - the segment's to close
        except OSError:
            return None
        try:
            return Segment(file, self._map(file.fileno()))
        except (OSError, ValueError):  # no memory for it, or a successor just makes its own
            file.close()
            return None

    def _map(self, fd: int) -> mmap.mmap:
        """All of a segment, mapped once for all lanes."""
        stat = os.fstat(fd)
        key = stat.st_dev, stat.st_ino
        with self._lock:
            if self._mapped is None or self._mapped[0] != key:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mapped = key, mmap.mmap(fd, stat.st_size, flags, mmap.PROT_READ)
            return self._mapped[1]
