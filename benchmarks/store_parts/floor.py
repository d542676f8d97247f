"""The physical limits: a copy in memory, and a plain TCP socket between two processes."""

import socket
import struct
import threading

import numpy as np

from store_parts.children import Child, answer_commands
from store_parts.contender import Blob, objects, serve_contender, touched

_SUM = struct.Struct("<I")


class Memcpy:
    """Copies within one process."""

    def __init__(self, blob: Blob) -> None:
        self.servers: list[int] = []
        self._blob, self._room = blob, touched(*blob.shape)

    def put(self, number: int) -> None:
        """Copies there."""
        np.copyto(self._room, self._blob)

    def get(self) -> None:
        """Copies here."""
        np.copyto(self._room, self._blob)

    def got(self) -> Blob:
        """The copy."""
        return self._room

    def close(self) -> None:
        """Nothing to end."""


class RawSocket:
    """A loopback TCP connection, `sendall` on one side and `recv_into` on the other.

    Args:
        blob: what to move.
        checksum: whether both sides compute crc32c of every object, and the receiver compares.
    """

    def __init__(self, blob: Blob, checksum: bool) -> None:
        self._server = Child("raw_server", shape=list(blob.shape), checksum=checksum)
        self.servers = [self._server.pid]
        self._blob, self._room, self._checksum = blob, touched(*blob.shape), checksum
        self._socket = socket.create_connection(("127.0.0.1", self._server.facts["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, number: int) -> None:
        """Sends all objects; the server answers with one byte when it has them."""
        self._socket.sendall(b"p")
        send(self._socket, self._blob, self._checksum)
        assert self._socket.recv(1) == b"k", "the server went away"

    def get(self) -> None:
        """Receives all objects."""
        self._socket.sendall(b"g")
        receive(self._socket, self._room, self._checksum)

    def got(self) -> Blob:
        """What came."""
        return self._room

    def close(self) -> None:
        """Ends the server."""
        self._socket.close()
        self._server.close()


def send(to: socket.socket, blob: Blob, checksum: bool) -> None:
    """Sends objects one after the other, each behind its checksum (0 without)."""
    for row in blob:
        to.sendall(_SUM.pack(_crc(row) if checksum else 0))
        to.sendall(row)


def receive(source: socket.socket, room: Blob, checksum: bool) -> None:
    """Receives objects into their place."""
    head = bytearray(_SUM.size)
    for row in room:
        _fill(source, memoryview(head))
        _fill(source, memoryview(row))
        if checksum and _SUM.unpack(head)[0] != _crc(row):
            raise ValueError("an object came damaged")


def memcpy_child(shape: list[int]) -> None:
    """Role of the copy."""
    blob = objects(*shape)
    serve_contender(Memcpy(blob), blob)


def raw_child(shape: list[int], checksum: bool) -> None:
    """Role of the socket's client."""
    blob = objects(*shape)
    serve_contender(RawSocket(blob, checksum), blob)


def raw_server_child(shape: list[int], checksum: bool) -> None:
    """Role of the socket's server: one connection at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, objects(*shape), checksum), daemon=True).start()
    answer_commands({"port": listener.getsockname()[1]}, {})


def _serve(listener: socket.socket, blob: Blob, checksum: bool) -> None:
    room = touched(*blob.shape)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            if wanted == b"g":
                send(connection, blob, checksum)
            else:
                receive(connection, room, checksum)
                connection.sendall(b"k")


def _fill(source: socket.socket, view: memoryview) -> None:
    while view:
        count = source.recv_into(view)
        if not count:
            raise ConnectionError("the other side went away")
        view = view[count:]


def _crc(row: Blob) -> int:
    from tailreplay.store.checksum import crc32c

    return crc32c(row.data)
