"""The bytes of the data lane: what the store and the client send each other beside gRPC.

A lane is a plain stream socket that carries payload without a copy into messages. gRPC hands out
the ticket that opens it, and everything the lane says is a fixed record of 80 bytes, a protobuf
message, or payload. Specified in docs/lane.md; golden bytes are in the tests.
"""

from __future__ import annotations

import enum
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.address import socket_path
from tailreplay.store.errors import IntegrityError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

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

MAX_REQUEST_BYTES = 64 << 20
_RECORD = struct.Struct("<BBHIIIIIIIQQ32s")
RECORD_BYTES = _RECORD.size
_IOV_MAX = 512


class Request(enum.IntEnum):
    """What a client asks for."""

    FETCH = 1
    """A FetchRequest follows; records come back."""
    PUT = 2
    """A PutPlan follows; WANTED comes back, the wanted objects' bytes go, and a DONE comes."""
    SEEN = 3
    """Placed rows up to the last BARRIER have been copied; nothing follows."""


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
    WANTED = 8
    """Answer to a PUT: a byte per object follows, 1 for those whose bytes are wanted."""
    ERROR = 7
    """The request failed; `code` is the gRPC status, its text of `size` bytes follows."""


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


def receive_into(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    """Fills buffers, in order, with what comes next.

    Raises:
        StoreUnavailable: the stream ends before they are full.
        OSError: it breaks, or nothing comes within the socket's timeout.
    """
    waiting = [part for part in parts if len(part)]
    at = 0
    while at < len(waiting):
        got = sock.recvmsg_into(waiting[at : at + _IOV_MAX])[0]
        if not got:
            raise StoreUnavailable("the lane was closed in the middle of a message")
        while at < len(waiting) and got >= len(waiting[at]):
            got -= len(waiting[at])
            at += 1
        if got:
            waiting[at] = waiting[at][got:]


def receive(sock: socket.socket, size: int) -> bytes:
    """The next `size` bytes, as `receive_into`."""
    data = bytearray(size)
    receive_into(sock, [memoryview(data)])
    return bytes(data)


def send(sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Sends buffers, in order, without joining them.

    Raises:
        OSError: the stream breaks, or its reader takes nothing within the socket's timeout.
    """
    waiting = [view for part in parts if len(view := memoryview(part))]
    at = 0
    while at < len(waiting):
        sent = sock.sendmsg(waiting[at : at + _IOV_MAX])
        while at < len(waiting) and sent >= len(waiting[at]):
            sent -= len(waiting[at])
            at += 1
        if sent:
            waiting[at] = waiting[at][sent:]


def connect(address: str, timeout_s: float) -> socket.socket:
    """A stream socket to `unix:///path` or host:port.

    Raises:
        OSError: nobody listens there, or not in time.
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
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
