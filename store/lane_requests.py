"""What is asked for on a lane: fetches, puts, and staging segments for puts."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import InvalidRequest, LimitExceeded
from tailreplay.store.lane_answer import send_places, send_rows
from tailreplay.store.lane_wire import (
    MAX_REQUEST_BYTES,
    PLACED,
    REQUEST,
    STAGED,
    LaneRecord,
    Pace,
    RecordKind,
    Request,
    hang_up,
    has_hung_up,
    receive,
    send,
)
from tailreplay.store.put_source import PutSource, SocketSource, StagedSource
from tailreplay.store.staging import Staging

if TYPE_CHECKING:
    from tailreplay.store.auth import Principal
    from tailreplay.store.core import Store

_MAX_OBJECTS = 1 << 17
_STAGING_SHARE = 16
_PEER_CREDENTIALS = struct.Struct("3i")


class LaneRequests:
    """Serves requests, each on the thread of its lane.

    Args:
        store: what to serve.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Guarded by _lock: the staging segment of each lane that has one.
        self._lock = threading.Lock()
        self._stagings: dict[socket.socket, Staging] = {}

    def end(self, sock: socket.socket) -> None:
        """Gives back what a lane has, which does no more requests."""
        with self._lock:
            staging = self._stagings.pop(sock, None)
        if staging is not None:
            staging.close()

    def serve(self, sock: socket.socket, first: bytes, caller: Principal) -> None:
        """Serves one request; an error of the tree ends it and the connection.

        Args:
            sock: of the lane.
            first: what has been received of it already.
            caller: whose lane it is.

        Raises:
            TailReplayError: it is refused, or fails.
            OSError: the lane breaks, or its client takes nothing in time.
        """
        stall_s = self._store.leases.stall_limit_s
        pace = Pace(stall_s)
        head = first + receive(sock, REQUEST.size - len(first), pace)
        kind, flags, _, size = REQUEST.unpack(head)
        if size > MAX_REQUEST_BYTES:
            raise InvalidRequest(f"request of {size} bytes, wanted at most {MAX_REQUEST_BYTES}")
        data = receive(sock, size, pace)
        sock.settimeout(stall_s)
        try:
            if kind == Request.FETCH:
                placed = bool(flags & PLACED) and self._may_map(sock, caller)
                self._fetch(sock, pb.FetchRequest.FromString(data), placed, caller)
            elif kind == Request.PUT:
                self._put(sock, pb.PutPlan.FromString(data), caller, bool(flags & STAGED))
            elif kind == Request.STAGE:
                self._stage(sock, caller)
            else:
                raise InvalidRequest(f"request type {kind}, wanted FETCH, PUT or STAGE")
        except DecodeError as error:
            raise InvalidRequest(
                f"{Request(kind).name} is followed by no message of its own: {error}"
            ) from None

    def _may_map(self, sock: socket.socket, caller: Principal) -> bool:
        """Whether a client may read the pool itself: by the settings, its token and its user."""
        shared = self._store.tiers.shm_path and caller.shared_memory
        if not shared or sock.family != socket.AF_UNIX:
            return False
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, user, group = _PEER_CREDENTIALS.unpack(credentials)
        config = self._store.config
        if group == config.access_gid:
            return True
        return user in (0, os.getuid(), *config.share_memory_uids)

    def _fetch(
        self, sock: socket.socket, request: pb.FetchRequest, placed: bool, caller: Principal
    ) -> None:
        fetch = self._store.fetch(
            request,
            lambda: hang_up(sock),
            is_gone=lambda: has_hung_up(sock),
            placed=placed,
            caller=caller,
        )
        with closing(fetch) as frames:
            if placed:
                send_places(sock, frames, self._store.leases.stall_limit_s)
            else:
                send_rows(sock, frames)
        send(sock, [LaneRecord(RecordKind.DONE).pack()])

    def _stage(self, sock: socket.socket, caller: Principal) -> None:
        """Gives a lane a staging segment, if it may map memory and there is any left for that."""
        size = self._store.config.staging_bytes
        most = max(size, self._store.tiers.pool_bytes // _STAGING_SHARE)
        with self._lock:
            used = sum(staging.size_bytes for staging in self._stagings.values())
            may = sock not in self._stagings and size and used + size <= most
            if may and self._may_map(sock, caller):
                with suppress(OSError):
                    self._stagings[sock] = Staging(size)
            staging = self._stagings.get(sock)
        if staging is None or not may:
            send(sock, [LaneRecord(RecordKind.SEGMENT).pack()])
            return
        record = LaneRecord(RecordKind.SEGMENT, offset=staging.size_bytes).pack()
        socket.send_fds(sock, [record], [staging.fd])

    def _put(self, sock: socket.socket, plan: pb.PutPlan, caller: Principal, staged: bool) -> None:
        if len(plan.objects) > _MAX_OBJECTS:
            raise LimitExceeded(f"{len(plan.objects)} objects, wanted at most {_MAX_OBJECTS}")
        source = self._source(sock, staged)
        with self._store.open_put(plan.begin, caller) as session:
            wanted = bytes(session.claim(item) for item in plan.objects)
            send(sock, [LaneRecord(RecordKind.WANTED, offset=len(wanted)).pack(), wanted])
            due = [item for item, claimed in zip(plan.objects, wanted, strict=True) if claimed]
            session.store(due, source)
            answer = session.response.SerializeToString()
        sock.settimeout(self._store.leases.stall_limit_s)
        send(sock, [LaneRecord(RecordKind.DONE, offset=len(answer)).pack(), answer])

    def _source(self, sock: socket.socket, staged: bool) -> PutSource:
        pace = Pace(self._store.config.put_stall_limit_s)
        if not staged:
            return SocketSource(sock, pace)
        with self._lock:
            staging = self._stagings.get(sock)
        if staging is None:
            raise InvalidRequest("a staged put on a lane that has no staging segment")
        return StagedSource(sock, pace, staging)
