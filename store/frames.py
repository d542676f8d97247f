"""Frames of an answer: rows of objects as they lie in the pool, and word of those that are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c_of
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.header import Header, header_of, known_header
from tailreplay.store.lane_wire import LaneRecord, RecordKind
from tailreplay.store.row_sums import check_pages, crc32c_of_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailreplay.store.pins import Pinned
    from tailreplay.store.record import Record
    from tailreplay.store.window_pins import Reason
    from tailreplay.store.windows import Piece


class Frame(NamedTuple):
    """One step of an answer, before it is put on a wire.

    Attributes:
        record: what it says; rows carry no checksum yet.
        parts: the payload of rows, in pool memory, good until more is asked for than the end of
            the window.
        header: of the object that the rows are of.
    """

    record: LaneRecord
    parts: tuple[memoryview, ...] = ()
    header: Header | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload."""
        return sum(map(len, self.parts))

    @property
    def crc32c(self) -> int:
        """Checksum of the payload of rows."""
        if self.header is None:
            return crc32c_of(self.parts)
        record, units = self.record, self.parts
        if len(units) != record.units:
            size = len(units[0]) // record.units
            units = tuple(units[0][i * size : (i + 1) * size] for i in range(record.units))
        row = record.first_token - self.header.first_token
        return crc32c_of_rows(self.header, record.first_unit, row, units)


def header_for(data: memoryview, record: Record) -> Header:
    """The header of an object in the pool; its pages are not looked at.

    Raises:
        IntegrityError: it is damaged, or not that of `record`.
    """
    header = known_header(header_of(data))
    found = (header.name, header.first_token, header.rows)
    if found != (record.name, record.first_token, record.rows):
        raise IntegrityError(
            f"{record.name.kind.name} object at {record.first_token} holds rows "
            f"[{header.first_token}, {header.end_token}) of another prefix or position"
        )
    if header.header_bytes + header.payload_bytes != len(data):
        raise IntegrityError(
            f"object has {len(data)} bytes, wanted {header.header_bytes + header.payload_bytes}"
        )
    return header


def check_piece(piece: Piece, held: Pinned, header: Header, *, every: bool) -> None:
    """Checks the pages of a piece.

    Args:
        piece: which.
        held: its object.
        header: of that.
        every: all of them, else those of which rows are sent under a checksum of their own.

    Raises:
        IntegrityError: one is damaged.
    """
    first, units = piece.wanted.first_unit, piece.wanted.units or header.geometry.units
    check_pages(
        header,
        held.data[header.header_bytes :],
        range(first, min(first + units, header.geometry.units)),
        range(piece.first - header.first_token, piece.end - header.first_token),
        every=every,
    )


def rows_of(piece: Piece, held: Pinned, header: Header, frame_bytes: int) -> Iterator[Frame]:
    """Frames with a piece's rows, unit-major, each at most `frame_bytes` unless one unit is more.

    Rows that were not asked for never leave the store, so a reader of a shared prefix sees nothing
    of the sibling whose block it shares.

    Raises:
        InvalidRequest: the piece wants units that the object does not have.
    """
    row_bytes = header.geometry.row_bytes
    first_unit = piece.wanted.first_unit
    end_unit = first_unit + (piece.wanted.units or header.geometry.units - first_unit)
    if not 0 <= first_unit < end_unit <= header.geometry.units:
        raise InvalidRequest(
            f"range {piece.number} wants units [{first_unit}, {end_unit}) of "
            f"{header.geometry.units}"
        )
    stride = header.rows * row_bytes
    first = header.header_bytes + (piece.first - header.first_token) * row_bytes
    size = (piece.end - piece.first) * row_bytes
    step = max(1, frame_bytes // size)
    for unit in range(first_unit, end_unit, step):
        units = min(step, end_unit - unit)
        start = first + unit * stride
        rows = LaneRecord(
            RecordKind.ROWS,
            piece.number,
            tier=pb.TIER_CPU if held.source == "cpu" else pb.TIER_REDIS,
            first_unit=unit,
            units=units,
            first_token=piece.first,
            rows=piece.end - piece.first,
            row_bytes=row_bytes,
            offset=held.pool_offset + start,
            stride=stride,
            prefix_hash=held.name.prefix_hash,
        )
        ends = start + (units - 1) * stride + size
        if size == stride:
            yield Frame(rows, (held.data[start:ends],), header)
            continue
        pieces = tuple(held.data[at : at + size] for at in range(start, ends, stride))
        yield Frame(rows, pieces, header)


def missing(piece: Piece, reason: Reason) -> Frame:
    """Word that a piece's rows are not to be had."""
    return Frame(
        LaneRecord(
            RecordKind.MISSING,
            piece.number,
            code=reason,
            first_token=piece.first,
            rows=piece.end - piece.first,
        )
    )
