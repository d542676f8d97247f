"""HTTP for probes and scrapers: `/healthz`, `/readyz` and `/metrics`, nothing else.

A few lines of HTTP/1.0 on sockets, because what stands open to a cluster must not be held up by
whoever sends a byte a minute: a request has two seconds and 8 KiB, and the oldest of too many goes.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.address import host_of
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.lane_wire import Pace, hang_up, send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tailreplay.store.tls import ServerTls

logger = logging.getLogger(__name__)

REQUEST_S = 2.0
_MAX_REQUEST_BYTES = 8 << 10
_MAX_OPEN = 32
_PAUSE_S = 0.05
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Answer(NamedTuple):
    """What a page answers."""

    status: int
    body: bytes
    content_type: str = _TEXT


class HttpListener:
    """Serves pages from construction until `close`.

    Args:
        address: host:port; port 0 takes any free one.
        pages: what answers, by path; gets the value of `Authorization`, empty without one.
        tls: None = in the clear. Clients are not asked for certificates: probes have none.

    Attributes:
        address: where it is reached.

    Raises:
        StoreUnavailable: the address is taken.
    """

    def __init__(
        self,
        address: str,
        pages: Mapping[str, Callable[[str], Answer]],
        tls: ServerTls | None,
    ) -> None:
        self._pages = pages
        self._tls = tls
        host, port = host_of(address), int(address.rpartition(":")[2])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise StoreUnavailable(f"can not listen at {address!r}: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._closing = threading.Event()
        # Guarded by _lock: the threads that serve, oldest first, with their connections.
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name="http-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends every connection."""
        self._closing.set()
        hang_up(self._listener)
        self._acceptor.join()
        with self._lock:
            still = dict(self._open)
        for thread, sock in still.items():
            hang_up(sock)
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._closing.wait(_PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="http", daemon=True)
            with self._lock:
                crowded = len(self._open) >= _MAX_OPEN
                oldest = next(iter(self._open.values())) if crowded else None
                self._open[thread] = sock
            if oldest is not None:
                hang_up(oldest)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._end(thread)

    def _serve(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(REQUEST_S)
            sock = self._wrapped(plain)
            head = _receive_head(sock)
            answer = self._answer(head)
            sock.settimeout(REQUEST_S)
            send(sock, [_packed(answer, is_head=head.startswith(b"HEAD "))])
        except (OSError, StoreUnavailable) as error:
            logger.debug("a request over HTTP ended: %s", error)
        except Exception:  # the next one may do better
            logger.exception("a request over HTTP failed")
        finally:
            self._end(threading.current_thread())

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        if self._tls is None:
            return plain
        context = self._tls.without_client_certificate()
        sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open[threading.current_thread()] = sock
        sock.do_handshake()
        return sock

    def _end(self, thread: threading.Thread) -> None:
        with self._lock:
            sock = self._open.pop(thread)
        sock.close()

    def _answer(self, head: bytes) -> Answer:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Answer(400, b"wanted GET, a path and HTTP/1.1\n")
        if words[0] not in ("GET", "HEAD"):
            return Answer(405, b"wanted GET or HEAD\n")
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return Answer(404, f"wanted one of {', '.join(sorted(self._pages))}\n".encode())
        given = [
            value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
            if name.strip().lower() == "authorization"
        ]
        try:
            return page(given[0] if len(given) == 1 else "")
        except Exception:  # said to the asker, whose probe counts it
            logger.exception("%s failed", words[1])
            return Answer(500, b"failed, see the log\n")


def _receive_head(sock: socket.socket) -> bytes:
    """A request up to its empty line.

    Raises:
        StoreUnavailable: it is too long or ends before.
        OSError: it takes too long.
    """
    pace = Pace(REQUEST_S)
    buffer = bytearray(_MAX_REQUEST_BYTES)
    size = 0
    while b"\r\n\r\n" not in buffer[:size]:
        got = pace.receive(sock, [memoryview(buffer)[size:]]) if size < len(buffer) else 0
        if not got:
            raise StoreUnavailable(
                f"{size} bytes came without an empty line, wanted one within {len(buffer)}"
            )
        size += got
    return bytes(buffer[:size]).partition(b"\r\n\r\n")[0]


def _packed(answer: Answer, *, is_head: bool) -> bytes:
    more = "WWW-Authenticate: Bearer\r\n" if answer.status == 401 else ""
    head = (
        f"HTTP/1.0 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"Cache-Control: no-store\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else answer.body)
