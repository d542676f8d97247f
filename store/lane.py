"""The data lane's server: payload straight between pool memory and a socket, or not at all.

A thread accepts connections, and each connection has a thread of its own, which does one request
after the other: the store's workers for gRPC stay free for lookups.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.access import let_group_in
from tailreplay.store.address import host_of, socket_path
from tailreplay.store.auth import Role
from tailreplay.store.errors import (
    IntegrityError,
    InvalidRequest,
    LimitExceeded,
    NotAuthenticated,
    StoreUnavailable,
    TailReplayError,
)
from tailreplay.store.lane_answer import send_error, send_places, send_rows
from tailreplay.store.lane_tickets import Tickets, client_of_socket
from tailreplay.store.lane_wire import (
    ACCEPTED,
    HELLO,
    MAGIC,
    MAX_REQUEST_BYTES,
    PLACED,
    REQUEST,
    STAGED,
    VERSION,
    LaneRecord,
    Pace,
    RecordKind,
    Request,
    hang_up,
    has_hung_up,
    prepare,
    receive,
    send,
)
from tailreplay.store.put_source import PutSource, SocketSource, StagedSource
from tailreplay.store.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.store.auth import Access, Principal
    from tailreplay.store.core import Store
    from tailreplay.store.tls import ServerTls

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_WAITING = 64
_PAUSE_S = 0.05
_MAX_OBJECTS = 1 << 17
_STAGING_SHARE = 16
_PEER_CREDENTIALS = struct.Struct("3i")


class Lane:
    """Listens beside a gRPC address and serves whoever brings a ticket of its own.

    Args:
        store: what to serve.
        listen: the store's gRPC address; a Unix socket gets one beside it, a host any free port.
        max_connections: more are refused; where tokens are asked for, one tenant has half of them.
        access: says whether a caller's token is still good.
        tls: for TCP, as gRPC has it; None = in the clear.
        clock: seconds that only grow.

    Attributes:
        address: as OpenLaneResponse has it.
        tickets: that open a lane.

    Raises:
        OSError: it can not listen.
    """

    def __init__(
        self,
        store: Store,
        listen: str,
        *,
        max_connections: int,
        access: Access,
        tls: ServerTls | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_connections = max_connections
        self._access = access
        self._tls = None if listen.startswith("unix:") else tls
        self.tickets = Tickets(clock)
        self._closing = threading.Event()
        # Guarded by _lock: connections without a ticket so far, oldest first, open lanes, those of
        # them that are at work, and whether new requests are refused; _idle says that none works.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting: dict[socket.socket, None] = {}
        self._connections: dict[socket.socket, Principal] = {}
        self._busy: set[socket.socket] = set()
        self._draining = False
        self._stagings: dict[socket.socket, Staging] = {}
        self._listener, self.address = _listener(listen, store.config.access_gid)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="lane-accept", daemon=True)
        self._acceptor.start()

    def drain(self) -> None:
        """Takes no new connection and no new request; those at work go on."""
        self._closing.set()
        # A shutdown wakes accept and recv; closing alone would not.
        hang_up(self._listener)
        self._acceptor.join()
        with self._lock:
            self._draining = True
            idle = [sock for sock in (*self._waiting, *self._connections) if sock not in self._busy]
        for sock in idle:
            hang_up(sock)

    def close(self, grace_s: float = 0.0) -> None:
        """Lets requests end for so long, then ends every connection that is left.

        Returns when nobody reads the pool any more.
        """
        self.drain()
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, grace_s)
            open_now = [*self._waiting, *self._connections]
        for sock in open_now:
            hang_up(sock)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        if self.address.startswith("unix://"):
            with suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix://"))

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or a client that has gone again: neither ends the listening.
                if not self._closing.is_set():
                    logger.debug("no lane could be accepted: %s", error)
                    self._drop_oldest()
                    self._closing.wait(_PAUSE_S)
                continue
            self._threads = [t for t in self._threads if t.is_alive()]
            with self._lock:
                self._waiting[sock] = None
                crowded = len(self._waiting) > _MAX_WAITING
            if crowded:
                self._drop_oldest()
            thread = threading.Thread(target=self._serve, args=(sock,), name="lane", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._end(sock)
                continue
            self._threads.append(thread)

    def _drop_oldest(self) -> None:
        """Hangs up on who has gone longest without showing a ticket; its thread does the rest."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            hang_up(oldest)

    def _serve(self, plain: socket.socket) -> None:
        sock = plain
        try:
            sock = self._wrapped(plain)
            caller = self._greet(sock)
            while True:
                sock.settimeout(None)  # an idle client may be quiet for as long as it likes
                head = receive(sock, 1)
                caller = self._access.current(caller)
                with self._at_work(sock):
                    self._request(sock, head, caller)
        except (OSError, StoreUnavailable) as error:
            logger.debug("a lane ended: %s", error)
        except TailReplayError as error:
            logger.debug("a lane is refused: %s", error)
            if isinstance(error, IntegrityError):
                self._store.catalog.count("integrity_errors")
            with suppress(OSError):
                sock.settimeout(self._store.leases.stall_limit_s)
                send_error(sock, error)
        except Exception:  # the reader sees a closed lane, and the store goes on
            logger.exception("a lane failed")
        finally:
            self._end(sock)

    @contextmanager
    def _at_work(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._draining:
                raise StoreUnavailable("the store is about to stop")
            self._busy.add(sock)
        try:
            yield
        finally:
            with self._idle:
                self._busy.discard(sock)
                self._idle.notify_all()
                leaves = self._draining
            if leaves:
                hang_up(sock)

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(sock, None)
            self._connections.pop(sock, None)
            staging = self._stagings.pop(sock, None)
        if staging is not None:
            staging.close()
        sock.close()

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        """The socket to speak through; its handshake is still to come."""
        if self._tls is None:
            return plain
        sock = self._tls.context().wrap_socket(
            plain, server_side=True, do_handshake_on_connect=False
        )
        with self._lock:
            is_wanted = plain in self._waiting and not self._closing.is_set()
            self._waiting.pop(plain, None)
            if is_wanted:
                self._waiting[sock] = None
        if not is_wanted:
            sock.close()
            raise StoreUnavailable("hung up on before the handshake")
        return sock

    def _greet(self, sock: socket.socket) -> Principal:
        """Lets a client in that has a ticket; it has the stall limit for all of it."""
        stall_s = self._store.leases.stall_limit_s
        sock.settimeout(stall_s)
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        if sock.family != socket.AF_UNIX:
            prepare(sock)
        hello = receive(sock, HELLO.size, Pace(stall_s))
        magic, version, _, ticket = HELLO.unpack(hello)
        if (magic, version) != (MAGIC, VERSION):
            raise StoreUnavailable(
                f"a lane was opened with {magic!r} and version {version}, wanted {MAGIC!r} and "
                f"version {VERSION}"
            )
        try:
            caller = self.tickets.redeem(ticket, client_of_socket(sock))
        except NotAuthenticated as error:
            raise StoreUnavailable(str(error)) from None
        self._admit(sock, caller)
        sock.sendall(ACCEPTED)
        return caller

    def _admit(self, sock: socket.socket, caller: Principal) -> None:
        share = self._max_connections
        if caller.role is not Role.ANYONE:
            share = max(1, share // 2)
        with self._lock:
            own = sum(other.tenant == caller.tenant for other in self._connections.values())
            if len(self._connections) >= self._max_connections or own >= share:
                raise StoreUnavailable(
                    f"{len(self._connections)} lanes are open, {own} of this caller's, wanted "
                    f"fewer than {self._max_connections} and {share} (max_lanes allows no more)"
                )
            self._waiting.pop(sock, None)
            self._connections[sock] = caller

    def _request(self, sock: socket.socket, first: bytes, caller: Principal) -> None:
        """Serves one request; an error of the tree ends it and the connection."""
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


def _listener(listen: str, access_gid: int | None) -> tuple[socket.socket, str]:
    if listen.startswith("unix:"):
        path = f"{socket_path(listen)}.lane"
        with suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        os.chmod(path, 0o600)
        let_group_in(path, access_gid, 0o660)
        address = f"unix://{path}"
    else:
        host = host_of(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family)
        address = f":{sock.getsockname()[1]}"
    sock.listen(_BACKLOG)
    return sock, address
