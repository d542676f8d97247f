"""A stretch of network between two processes: it delays, and counts who speaks in turn."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


class TcpProxy:
    """Forwards connections to a port of this machine; closed with `close`.

    Args:
        port: where to.
        delay_s: how long every byte is under way, in each direction; bandwidth is not limited.

    Attributes:
        port: where it listens.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self._target = port
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        # State, under _lock: sockets to close.
        self._lock = threading.Lock()
        self._sockets = [self._listener]
        self._stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends everything."""
        self._stopped.set()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    way: queue.Queue[tuple[float, bytes]] = queue.Queue()
                    threading.Thread(target=self._take, args=(source, way), daemon=True).start()
                    threading.Thread(target=self._give, args=(way, sink), daemon=True).start()

    def _take(self, source: socket.socket, way: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                way.put((time.monotonic() + self._delay_s, data))
        way.put((time.monotonic() + self._delay_s, b""))

    def _give(self, way: queue.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = way.get()
                if self._stopped.wait(max(0.0, due_s - time.monotonic())):
                    return
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
