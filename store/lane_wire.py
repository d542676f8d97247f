"""The bytes of the data lane: what the store and the client send each other beside gRPC.

A lane is a plain stream socket that carries payload without a copy into messages. gRPC hands out
the ticket that opens it, and everything the lane says is a fixed record of 80 bytes, a protobuf
message, or payload. Specified in docs/lane.md; golden bytes are in the tests.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.address import host_of, socket_path
from tailreplay.store.errors import IntegrityError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAGIC = b"TRLN"
VERSION = 1
TICKET_BYTES = 32
HELLO = struct.Struct(f"<4sHH{TICKET_BYTES}s")
"""Magic, version, zero, ticket: the first thing a client sends; the store answers ACCEPTED."""

ACCEPTED = b"\x01"
REQUEST = struct.Struct("<BBHI")
"""Request type, flags, zero, bytes of the protobuf message that follows."""

PLACED = 1
"""Flag of a fetch: rows are to be placed in shared memory instead of sent."""

STAGED = 1
"""Flag of a put: objects lie in the lane's staging segment."""

MAX_REQUEST_BYTES = 16 << 20
"""Largest request, bytes; as large as a message of gRPC."""

MIN_BYTES_PER_S = 64 << 10
"""A sender that is slower than this for longer than its stall limit is cut off."""

_RECORD = struct.Struct("<BBHIIIIIIIQQ32s")
RECORD_BYTES = _RECORD.size
_IOV_MAX = 512
_STEP_BYTES = 1 << 20
_LEAST_WAIT_S = 0.001
_NEAR_BYTES = 512 << 10
"""Send buffer of a lane within one machine; the kernel doubles it."""


class Request(enum.IntEnum):
    """What a client asks for."""

    FETCH = 1
    """A FetchRequest follows; records come back."""
    PUT = 2
    """A PutPlan follows; WANTED comes back, the wanted objects' bytes go, and a DONE comes."""
    SEEN = 3
    """Placed rows up to the last BARRIER have been copied; nothing follows."""
    STAGE = 4
    """Asks for a staging segment; nothing follows, and SEGMENT comes back."""


class RecordKind(enum.IntEnum):
    """What a record of the store says."""

    LEASE = 0
    """The lease's id follows; `offset` is the stall limit in milliseconds."""
    ROWS = 1
    """`rows * units` rows follow in `units` pieces; `crc32c` is over all of them."""
    PLACED_ROWS = 2
    """Unit i's rows lie at `offset + i * stride` in the shared segment, until SEEN."""
    BARRIER = 3
    """The client must say SEEN before more comes."""
    MISSING = 4
    """Nothing more of the range follows; `code` is the MissReason, `rows` how many are missing."""
    RANGE_END = 5
    """All rows of the range have been sent."""
    DONE = 6
    """The request is over; a message of `size` bytes may follow."""
    ERROR = 7
    """The request failed; `code` is the gRPC status, its text of `size` bytes follows."""
    WANTED = 8
    """Answer to a PUT: a byte per object follows, 1 for those whose bytes are wanted."""
    SEGMENT = 9
    """A staging segment of `offset` bytes, whose descriptor comes with it; 0 bytes = none."""
    TAKEN = 10
    """The next object of a staged put has been copied."""


class LaneRecord(NamedTuple):
    """One record; fields that its type does not use are zero.

    Attributes:
        kind: what it says.
        number: which range.
        tier: proto number of the tier the rows come from.
        code: MissReason, or status code.
        first_unit: first unit of the rows.
        units: units of the rows.
        first_token: position of the first row.
        rows: rows per unit.
        row_bytes: bytes of a row.
        crc32c: over the payload that follows.
        offset: where the first unit's rows lie in the segment; for DONE and ERROR the size.
        stride: bytes between units in the segment.
        prefix_hash: of the object the rows come from.
    """

    kind: RecordKind
    number: int = 0
    tier: int = 0
    code: int = 0
    first_unit: int = 0
    units: int = 0
    first_token: int = 0
    rows: int = 0
    row_bytes: int = 0
    crc32c: int = 0
    offset: int = 0
    stride: int = 0
    prefix_hash: bytes = bytes(32)

    def pack(self) -> bytes:
        """The record's 80 bytes."""
        return _RECORD.pack(
            self.kind,
            self.tier,
            self.code,
            self.number,
            self.first_unit,
            self.units,
            self.first_token,
            self.rows,
            self.row_bytes,
            self.crc32c,
            self.offset,
            self.stride,
            self.prefix_hash,
        )


def unpack_record(data: bytes | bytearray | memoryview) -> LaneRecord:
    """Reads a record.

    Raises:
        IntegrityError: its type is unknown.
    """
    (kind, tier, code, number, unit, units, token, rows, row_bytes, crc, offset, stride, name) = (
        _RECORD.unpack(data)
    )
    try:
        known = RecordKind(kind)
    except ValueError:
        raise IntegrityError(f"lane record has type {kind}, wanted {list(RecordKind)}") from None
    return LaneRecord(
        known, number, tier, code, unit, units, token, rows, row_bytes, crc, offset, stride, name
    )


class Pace:
    """How slow a sender may be: time it may still use, given back as its bytes come.

    Without it, one byte just before each timeout would hold a lane, and what it has claimed, for
    ever.

    Args:
        stall_s: longest time without progress.
        clock: seconds that only grow.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._left_s = stall_s
        self._clock = clock

    def receive(self, sock: socket.socket, buffers: Sequence[memoryview]) -> int:
        """Receives what has come into the first buffers; 0 at the end of the stream.

        Raises:
            TimeoutError: the sender has used its time up.
        """
        sock.settimeout(max(self._left_s, _LEAST_WAIT_S))
        started = self._clock()
        got = _receive_some(sock, buffers)
        self.note(self._clock() - started, got)
        return got

    def note(self, spent_s: float, got: int) -> None:
        """Takes down how long was waited for how many bytes.

        Raises:
            TimeoutError: the sender has used its time up.
        """
        if spent_s > self._left_s:
            raise TimeoutError(f"the other end sends below {MIN_BYTES_PER_S} bytes/s")
        self._left_s = min(self._stall_s, self._left_s - spent_s + got / MIN_BYTES_PER_S)


def receive_into(
    sock: socket.socket, parts: Sequence[memoryview], pace: Pace | None = None
) -> None:
    """Fills buffers, in order, with what comes next.

    Args:
        sock: where from.
        parts: what to fill.
        pace: how slow the sender may be; None = it may take the socket's timeout for each byte.

    Raises:
        StoreUnavailable: the stream ends before they are full.
        OSError: it breaks, or nothing comes in time.
    """
    waiting = [part for part in parts if len(part)]
    at = 0
    while at < len(waiting):
        some = waiting[at : at + _IOV_MAX]
        got = _receive_some(sock, some) if pace is None else pace.receive(sock, some)
        if not got:
            raise StoreUnavailable("the lane was closed in the middle of a message")
        while at < len(waiting) and got >= len(waiting[at]):
            got -= len(waiting[at])
            at += 1
        if got:
            waiting[at] = waiting[at][got:]


def receive(sock: socket.socket, size: int, pace: Pace | None = None) -> bytes:
    """The next `size` bytes, as `receive_into`; memory is taken as they come."""
    data = bytearray()
    while len(data) < size:
        step = bytearray(min(size - len(data), _STEP_BYTES))
        receive_into(sock, [memoryview(step)], pace)
        data += step
    return bytes(data)


def _receive_some(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(buffers[0])
    return sock.recvmsg_into(buffers)[0]


def _send_some(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    if isinstance(sock, ssl.SSLSocket):
        return sock.send(buffers[0])
    return sock.sendmsg(buffers)


def hang_up(sock: socket.socket) -> None:
    """Ends a stream both ways; a thread that waits on it wakes up.

    Not by the method of a TLS socket, which forgets its keys first: another thread would go on in
    the clear.
    """
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def has_hung_up(sock: socket.socket) -> bool:
    """Says whether the other side has ended the stream, without reading from it."""
    look = select.poll()
    look.register(sock, select.POLLRDHUP)
    return bool(look.poll(0))


def send(sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Sends buffers, in order, without joining them.

    Raises:
        OSError: the stream breaks, or its reader takes nothing within the socket's timeout.
    """
    waiting = [view for part in parts if len(view := memoryview(part))]
    at = 0
    while at < len(waiting):
        sent = _send_some(sock, waiting[at : at + _IOV_MAX])
        while at < len(waiting) and sent >= len(waiting[at]):
            sent -= len(waiting[at])
            at += 1
        if sent:
            waiting[at] = waiting[at][sent:]


def prepare(sock: socket.socket) -> None:
    """Sets a lane's TCP socket up, at either end.

    Between processes of one machine the kernel lets megabytes wait to be read, by when they have
    left the processor's cache: fewer cost a third less to move. A network needs as many as it has
    under way, and is left alone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BYTES)


def connect(address: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A stream socket to `unix:///path` or host:port.

    Args:
        address: where to.
        timeout_s: longest wait.
        tls: for TCP; None = in the clear.

    Raises:
        OSError: nobody listens there, or not in time, or it is not whom `tls` wants.
    """
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(socket_path(address))
        except OSError:
            sock.close()
            raise
        return sock
    host = host_of(address)
    sock = socket.create_connection((host, int(address.rpartition(":")[2])), timeout_s)
    prepare(sock)
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=host)
    except OSError:
        sock.close()
        raise
