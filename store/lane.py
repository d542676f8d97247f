"""The data lane's server: payload straight between pool memory and a socket, or not at all.

A thread accepts connections, and each connection has a thread of its own, which does one request
after the other: the store's workers for gRPC stay free for lookups.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.address import socket_path
from tailreplay.store.errors import (
    IntegrityError,
    InvalidRequest,
    StoreUnavailable,
    TailReplayError,
)
from tailreplay.store.lane_wire import (
    ACCEPTED,
    HELLO,
    MAGIC,
    MAX_REQUEST_BYTES,
    PLACED,
    REQUEST,
    VERSION,
    LaneRecord,
    RecordKind,
    Request,
    receive,
    receive_into,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.core import Store
    from tailreplay.store.reader import Frame

logger = logging.getLogger(__name__)

TICKET_S = 10.0
_MAX_TICKETS = 1024
_SCRATCH_BYTES = 1 << 20
_ENDS = (RecordKind.RANGE_END, RecordKind.MISSING, RecordKind.BARRIER)


class Lane:
    """Listens beside a gRPC address and serves whoever brings a ticket.

    Args:
        store: what to serve.
        listen: the store's gRPC address; a Unix socket gets one beside it, a host any free port.
        max_connections: more are refused.
        clock: seconds that only grow.

    Attributes:
        address: as OpenLaneResponse has it.

    Raises:
        OSError: it can not listen.
    """

    def __init__(
        self,
        store: Store,
        listen: str,
        *,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_connections = max_connections
        self._clock = clock
        # Guarded by _lock: tickets with the time they end, and open connections.
        self._lock = threading.Lock()
        self._tickets: dict[bytes, float] = {}
        self._connections: set[socket.socket] = set()
        self._listener, self.address = _listener(listen)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="lane-accept", daemon=True)
        self._acceptor.start()

    def ticket(self) -> bytes:
        """A fresh ticket for one connection."""
        now = self._clock()
        ticket = secrets.token_bytes(32)
        with self._lock:
            self._tickets = {t: end for t, end in self._tickets.items() if end > now}
            if len(self._tickets) < _MAX_TICKETS:
                self._tickets[ticket] = now + TICKET_S
        return ticket

    def close(self) -> None:
        """Ends every connection, and waits until nobody reads the pool any more."""
        with self._lock:
            open_now = list(self._connections)
        # A shutdown wakes accept and recv; closing alone would not.
        for sock in (self._listener, *open_now):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        if self.address.startswith("unix://"):
            with suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix://"))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._threads = [t for t in self._threads if t.is_alive()]
            with self._lock:
                admitted = len(self._connections) < self._max_connections
                if admitted:
                    self._connections.add(sock)
            if not admitted:
                sock.close()
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="lane", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        stall_s = self._store.leases.stall_limit_s
        try:
            sock.settimeout(stall_s)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(sock)
            while True:
                sock.settimeout(None)  # an idle client may be quiet for as long as it likes
                head = receive(sock, REQUEST.size)
                sock.settimeout(stall_s)
                self._request(sock, *REQUEST.unpack(head))
        except (OSError, StoreUnavailable) as error:
            logger.debug("a lane ended: %s", error)
        except TailReplayError as error:
            logger.debug("a lane is refused: %s", error)
            if isinstance(error, IntegrityError):
                self._store.catalog.count("integrity_errors")
            with suppress(OSError):
                _send_error(sock, error)
        except Exception:  # the reader sees a closed lane, and the store goes on
            logger.exception("a lane failed")
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        magic, version, _, ticket = HELLO.unpack(receive(sock, HELLO.size))
        with self._lock:
            end = self._tickets.pop(ticket, 0.0)
        if (magic, version) != (MAGIC, VERSION) or end <= self._clock():
            raise StoreUnavailable("a lane was opened without a valid ticket")
        sock.sendall(ACCEPTED)

    def _request(self, sock: socket.socket, kind: int, flags: int, _: int, size: int) -> None:
        """Serves one request; an error of the tree ends it and the connection."""
        if size > MAX_REQUEST_BYTES:
            raise InvalidRequest(f"request of {size} bytes, wanted at most {MAX_REQUEST_BYTES}")
        data = receive(sock, size)
        try:
            if kind == Request.FETCH:
                self._fetch(sock, pb.FetchRequest.FromString(data), bool(flags & PLACED))
            elif kind == Request.PUT:
                self._put(sock, pb.PutPlan.FromString(data))
            else:
                raise InvalidRequest(f"request type {kind}, wanted FETCH or PUT")
        except DecodeError as error:
            raise InvalidRequest(f"request is no message: {error}") from None

    def _fetch(self, sock: socket.socket, request: pb.FetchRequest, placed: bool) -> None:
        def cancel() -> None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        waiting: list[bytes] = []
        with closing(self._store.fetch(request, cancel, placed=placed)) as frames:
            for frame in frames:
                if frame.record.kind is RecordKind.LEASE:
                    continue
                if not placed:
                    _send_frame(sock, frame)
                    continue
                # Placed rows are 80 bytes each: sent together, at the end of their range.
                waiting.append(_placed(frame.record).pack())
                if frame.record.kind in _ENDS:
                    try:
                        send(sock, waiting)
                        if frame.record.kind is RecordKind.BARRIER:
                            _wait_seen(sock)
                    except BaseException:
                        # Before the pins end: a reader that finds the lane open after it has
                        # copied knows that what it copied was pinned all along.
                        cancel()
                        raise
                    waiting.clear()
        send(sock, [*waiting, LaneRecord(RecordKind.DONE).pack()])

    def _put(self, sock: socket.socket, plan: pb.PutPlan) -> None:
        with self._store.open_put(plan.begin) as session:
            wanted = bytes(session.claim(item) for item in plan.objects)
            send(sock, [LaneRecord(RecordKind.WANTED, offset=len(wanted)).pack(), wanted])
            due = [item for item, claimed in zip(plan.objects, wanted, strict=True) if claimed]
            while due:
                item = due.pop(0)
                try:
                    if not session.store(item, lambda view: receive_into(sock, [view])):
                        _discard(sock, item.size_bytes)
                except TailReplayError:
                    # It was refused once its bytes were here; with the rest still coming, the
                    # client would not hear why.
                    _discard(sock, sum(rest.size_bytes for rest in due))
                    raise
            answer = session.response.SerializeToString()
        send(sock, [LaneRecord(RecordKind.DONE, offset=len(answer)).pack(), answer])


def _listener(listen: str) -> tuple[socket.socket, str]:
    if listen.startswith("unix:"):
        path = f"{socket_path(listen)}.lane"
        with suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        os.chmod(path, 0o600)
        address = f"unix://{path}"
    else:
        host = listen.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family)
        address = f":{sock.getsockname()[1]}"
    sock.listen(128)
    return sock, address


def _send_frame(sock: socket.socket, frame: Frame) -> None:
    record = frame.record
    if record.kind is RecordKind.BARRIER:
        return
    if record.kind is RecordKind.ROWS:
        record = record._replace(crc32c=frame.crc32c, offset=0, stride=0)
    send(sock, [record.pack(), *frame.parts])


def _placed(record: LaneRecord) -> LaneRecord:
    if record.kind is RecordKind.ROWS:
        return record._replace(kind=RecordKind.PLACED_ROWS)
    return record


def _wait_seen(sock: socket.socket) -> None:
    kind = REQUEST.unpack(receive(sock, REQUEST.size))[0]
    if kind != Request.SEEN:
        raise InvalidRequest(f"request type {kind} while placed rows are held, wanted SEEN")


def _discard(sock: socket.socket, size: int) -> None:
    scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
    while size:
        receive_into(sock, [scratch[: min(size, len(scratch))]])
        size -= min(size, len(scratch))


def _send_error(sock: socket.socket, error: TailReplayError) -> None:
    text = str(error).encode()
    code = error.code.value[0]
    send(sock, [LaneRecord(RecordKind.ERROR, code=code, offset=len(text)).pack(), text])
