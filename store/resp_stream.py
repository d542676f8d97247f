"""Bytes to and from a Redis server, between the socket and the caller's memory, in large steps.

A plain socket blocks in the kernel, with the kernel's own timeouts: a step of a megabyte is one
call that gives the interpreter away once, where a socket of Python's with a timeout comes back for
every piece that has arrived. Between steps a caller may hold a transfer up.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from functools import partial

STEP_BYTES = 1 << 20
"""Moved between two looks at whether to go on."""

_BUFFER_BYTES = 16 << 10
_TIMEVAL = struct.Struct("@ll")

Between = Callable[[], None]


class CutOff(Exception):
    """The server ended the connection inside something.

    Attributes:
        got_bytes: how much of it had come.
    """

    def __init__(self, got_bytes: int) -> None:
        super().__init__(f"cut off after {got_bytes} bytes")
        self.got_bytes = got_bytes


class RespStream:
    """The bytes of one connection. For one thread at a time, but for `abort`.

    Every method raises OSError when the connection fails, TimeoutError when the server neither
    takes nor gives a byte in time.

    Args:
        sock: a connected socket, owned from now on.
        timeout_s: limit for each wait.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._plain = not isinstance(sock, ssl.SSLSocket)
        if self._plain:
            sock.settimeout(None)
        self._timeout_s = 0.0
        self.set_timeout(timeout_s)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0

    def set_timeout(self, timeout_s: float) -> None:
        """Set the limit for each wait from now on."""
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        if not self._plain:
            self._socket.settimeout(timeout_s)
            return
        limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, parts: Sequence[bytes | memoryview], between: Between | None = None) -> None:
        """Send `parts`, one after the other; `between` is called before each step of large ones."""
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) <= STEP_BYTES:
                small.append(part)
                continue
            view = memoryview(part)
            for at in range(0, len(view), STEP_BYTES):
                self._send_all([*small, view[at : at + STEP_BYTES]])
                small = []
                if between is not None:
                    between()
        self._send_all(small)

    def line(self) -> bytes:
        """Return what comes up to the next CRLF, without it.

        Raises:
            CutOff: the connection ended, or 16 KiB held no CRLF.
        """
        found = self._buffer.find(b"\r\n", self._start, self._end)
        while found < 0:
            had = self._end - self._start
            if had == _BUFFER_BYTES or not self._fill():
                raise CutOff(had)
            found = self._buffer.find(b"\r\n", self._start, self._end)
        line = bytes(self._buffer[self._start : found])
        self._start = found + 2
        return line

    def read_into(self, part: memoryview, between: Between | None = None) -> None:
        """Fill `part`; `between` is called after each step but the last.

        Raises:
            CutOff: the connection ended before.
        """
        at = min(len(part), self._end - self._start)
        part[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        while at < len(part):
            step = part[at : at + STEP_BYTES]
            # Small reads go through the buffer, which takes the next reply's first line along.
            got = self._receive(step) if len(step) >= _BUFFER_BYTES else self._through_buffer(step)
            if not got:
                raise CutOff(at)
            at += got
            if between is not None and at < len(part):
                between()

    def abort(self) -> None:
        """Make what waits in another thread fail now."""
        # Of a TLS socket too it is the connection below that ends; its session has no lock.
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send_all(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self._plain:
            for part in parts:
                self._socket.sendall(part)
            return
        unsent = [memoryview(part) for part in parts if len(part)]
        while unsent:
            sent = _timed(partial(self._socket.sendmsg, unsent))
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.pop(0))
            if sent:
                unsent[0] = unsent[0][sent:]

    def _receive(self, into: memoryview) -> int:
        """Fill `into`, or a part of it; 0 at the connection's end."""
        if not self._plain:
            return self._socket.recv_into(into)
        return _timed(lambda: self._socket.recv_into(into, len(into), socket.MSG_WAITALL))

    def _through_buffer(self, into: memoryview) -> int:
        if self._start == self._end and not self._fill():
            return 0
        got = min(len(into), self._end - self._start)
        into[:got] = self._buffer[self._start : self._start + got]
        self._start += got
        return got

    def _fill(self) -> int:
        """Take what has come into the buffer, at least a byte; 0 at the connection's end."""
        if self._start:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        free = memoryview(self._buffer)[self._end :]
        got = _timed(lambda: self._socket.recv_into(free))
        self._end += got
        return got


def _timed(call: Callable[[], int]) -> int:
    """Run a call on a blocking socket, whose timeout the kernel reports as EAGAIN."""
    try:
        return call()
    except BlockingIOError as error:
        raise TimeoutError(errno.ETIMEDOUT, "timed out") from error
