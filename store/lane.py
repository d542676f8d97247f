"""The data lane's server: payload straight between pool memory and a socket, or not at all.

A thread accepts connections, and each connection has a thread of its own, which does one request
after the other: the store's workers for gRPC stay free for lookups.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tailreplay.store.access import let_group_in
from tailreplay.store.address import host_of, socket_path
from tailreplay.store.auth import Role
from tailreplay.store.errors import (
    IntegrityError,
    NotAuthenticated,
    StoreUnavailable,
    TailReplayError,
)
from tailreplay.store.lane_answer import send_error
from tailreplay.store.lane_requests import LaneRequests
from tailreplay.store.lane_tickets import Tickets, client_of_socket
from tailreplay.store.lane_wire import (
    ACCEPTED,
    HELLO,
    MAGIC,
    VERSION,
    Pace,
    hang_up,
    prepare,
    receive,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.store.auth import Access, Principal
    from tailreplay.store.core import Store
    from tailreplay.store.tls import ServerTls

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_WAITING = 64
_PAUSE_S = 0.05


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
        self._requests = LaneRequests(store)
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
                    self._requests.serve(sock, head, caller)
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
        self._requests.end(sock)
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
