"""Fetch: sends rows of stored objects in the order asked for, pinning a window at a time."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.catalog import records_on
from tailreplay.store.checksum import crc32c_of
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.header import Header, header_of, known_header
from tailreplay.store.lane_wire import LaneRecord, RecordKind
from tailreplay.store.look_ahead import Early, LookAhead, Stream
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pin_budget import PinBudget
from tailreplay.store.pins import Pinned
from tailreplay.store.row_sums import crc32c_of_rows
from tailreplay.store.windows import Piece, is_urgent, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Path

    Reason: TypeAlias = pb.MissReason.ValueType

_Pins: TypeAlias = "tuple[dict[ObjectName, Pinned], dict[ObjectName, Reason]]"
"""A window's objects that are pinned, and why others are not."""

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2 << 20
"""Most payload in one frame, bytes; far below gRPC's message limit of 16 MiB."""

MAX_RANGES = 4096
"""Most ranges of one request."""

_MAY_COME_LATER = {
    Miss.AWAY: pb.MISS_REASON_DEADLINE,
    Miss.LATE: pb.MISS_REASON_DEADLINE,
    Miss.NO_ROOM: pb.MISS_REASON_NO_ROOM,
}
_TOO_EARLY = (Miss.LATE, Miss.NO_ROOM)
_PLACED_SHARE = 4
_PLACED_FRAME_BYTES = 1 << 30


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


@dataclass(slots=True)
class _Answer:
    """One answer on its way.

    Attributes:
        frame_bytes: most payload in a frame.
        is_gone: whether its reader has left.
        dead: ranges of which no more follows.
        served_bytes: payload offered since that was last counted.
    """

    frame_bytes: int
    is_gone: Callable[[], bool]
    dead: set[int] = field(default_factory=set)
    served_bytes: int = 0


class PinLimits(NamedTuple):
    """How much readers pin at a time.

    Attributes:
        window_bytes: bytes of objects of the window that one stream sends.
        ahead_windows: windows that it has loaded from Redis meanwhile.
        leased_bytes: bytes of all streams.
    """

    window_bytes: int
    ahead_windows: int
    leased_bytes: int


class Reader:
    """Serves Fetch streams.

    Args:
        catalog: what exists.
        tiers: where it is.
        limits: how much is pinned at a time.
        timeout_s: longest wait for one window to come from Redis, or for other streams' pins.
        before_rows: called before the rows of each piece are sent; tests hold bulk rows back here.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        limits: PinLimits,
        timeout_s: float,
        before_rows: Callable[[Kind], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._window_bytes = min(limits.window_bytes, limits.leased_bytes)
        self._leased_bytes = limits.leased_bytes
        self._budget = PinBudget(limits.leased_bytes)
        self._timeout_s = timeout_s
        self._before_rows = before_rows
        self._ahead = LookAhead(
            self._pin_early, self._let_go, self._budget, limits.ahead_windows, self._window_bytes
        )

    def close(self) -> None:
        """Gives up what is loaded ahead. Before the tiers are closed."""
        self._ahead.close()

    def frames(
        self,
        request: pb.FetchRequest,
        public: bytes | None = None,
        *,
        placed: bool = False,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Generator[Frame, None, None]:
        """Frames that answer a request: rows, missing rows, ends of ranges and of windows.

        Args:
            request: what is wanted.
            public: namespace of the public scope, where that is read as well.
            placed: whether rows are placed in shared memory: fewer waits and frames are better.
            is_gone: whether the reader has left, so that nothing need be waited for.

        Raises:
            InvalidRequest: a range is empty, backwards or of no kind.
        """
        _check_ranges(request.ranges)
        space, leaf = request.namespace, request.leaf
        hidden = any(wanted.kind == pb.KIND_HIDDEN for wanted in request.ranges)
        if public is None:
            path = self._catalog.path(space, leaf, hidden=hidden)
        else:
            path = self._catalog.path_with_public(space, public, leaf, hidden=hidden)
        asked: dict[ObjectName, Record] = {}
        window_bytes = self._window_bytes
        answer = _Answer(_PLACED_FRAME_BYTES if placed else MAX_FRAME_BYTES, is_gone)
        if placed:
            window_bytes = max(window_bytes, self._leased_bytes // _PLACED_SHARE)
        # Never all pieces at once: many long ranges have more than there is memory for.
        pieces = self._asked_pieces(request, path, asked, public)
        try:
            cut = windows(pieces, window_bytes, self._window_bytes)
            with Stream(self._ahead, cut, is_gone) as stream:
                for window, early in stream:
                    yield from self._send_window(window, early, stream, answer)
        finally:
            self._catalog.used(_used(path, request.ranges, asked))

    def _asked_pieces(
        self,
        request: pb.FetchRequest,
        path: Path,
        asked: dict[ObjectName, Record],
        public: bytes | None,
    ) -> Iterator[Piece]:
        """The pieces of every range; notes their records in `asked`."""
        for number, wanted in enumerate(request.ranges):
            if int(wanted.kind) == Kind.CHECKPOINT:
                pieces = [self._checkpoint(request.namespace, number, wanted, public)]
            else:
                pieces = self._pieces(path, number, wanted)
            for piece in pieces:
                if piece.record is not None:
                    asked[piece.record.name] = piece.record
                yield piece

    def _pieces(self, path: Path, number: int, wanted: pb.Range) -> list[Piece]:
        first, end = wanted.first_token, wanted.end_token
        pieces, at = [], first
        for record in records_on(path, Kind(wanted.kind)):
            if record.end_token <= at or at >= end:
                continue
            stop = min(record.end_token, end)
            pieces.append(Piece(number, wanted, record, at, stop, last=stop == end))
            at = stop
        if at < end:
            pieces.append(Piece(number, wanted, None, at, end, last=True))
        return pieces

    def _checkpoint(
        self, namespace: bytes, number: int, wanted: pb.Range, public: bytes | None
    ) -> Piece:
        record = self._catalog.record(ObjectName(namespace, Kind.CHECKPOINT, wanted.prefix_hash))
        if record is None and public is not None:
            record = self._catalog.public_state(public, wanted.prefix_hash)
        first, end = wanted.first_token, wanted.end_token
        wrong = record is not None and record.end_token != end
        if end - first != 1 or wrong:
            raise InvalidRequest(
                f"range {number} is the checkpoint [{first}, {end}), wanted the one row before "
                f"token {record.end_token if record is not None else end}"
            )
        return Piece(number, wanted, record, first, end, last=True)

    def _send_window(
        self,
        window: Sequence[Piece],
        early: Early | None,
        stream: Stream,
        answer: _Answer,
    ) -> Iterator[Frame]:
        live = [p for p in window if p.number not in answer.dead]
        records = {p.record.name: p.record for p in live if p.record is not None}
        with self._share(early, sum(r.size for r in records.values()), stream) as granted:
            if granted:
                with self._tiers.gate.urgent() if is_urgent(live) else nullcontext():
                    if early is None:
                        pins = self._pins(list(records.values()), is_urgent(live), answer)
                    else:
                        pins = self._early_pins(early, is_urgent(live), stream, answer)
                    yield from self._send_pinned(live, pins, stream.begin, answer)
                return
        for piece in live:
            if piece.number not in answer.dead:
                answer.dead.add(piece.number)
                yield _missing(piece, pb.MISS_REASON_DEADLINE)

    @contextmanager
    def _share(self, early: Early | None, size: int, stream: Stream) -> Iterator[bool]:
        """A window's share of what all readers may pin."""
        if early is None:
            with self._budget.hold(size, self._timeout_s, stream.let_go) as granted:
                yield granted
            return
        try:
            yield True
        finally:
            early.release()

    def _send_pinned(
        self,
        live: Sequence[Piece],
        pins: _Pins,
        begin_next: Callable[[], None],
        answer: _Answer,
    ) -> Iterator[Frame]:
        pinned, reasons = pins
        headers: dict[ObjectName, Header] = {}
        try:
            begin_next()
            for piece in live:
                if piece.number in answer.dead:
                    continue
                if self._before_rows is not None:
                    self._before_rows(Kind(piece.wanted.kind))
                why = yield from self._send_piece(piece, pinned, headers, reasons, answer)
                if why:
                    answer.dead.add(piece.number)
                    yield _missing(piece, why)
                elif piece.last:
                    yield Frame(LaneRecord(RecordKind.RANGE_END, piece.number))
            yield Frame(LaneRecord(RecordKind.BARRIER))
        finally:
            self._tiers.unpin(pinned.values())
            self._catalog.count("served_bytes", answer.served_bytes)
            answer.served_bytes = 0

    def _pins(self, records: Sequence[Record], urgent: bool, answer: _Answer) -> _Pins:
        """Pins a window's objects; says for those that can not be had why not."""
        wanted = [r for r in records if r.exists]
        came = self._pin(wanted, urgent, answer.is_gone)
        return {one.name: one for one in came if isinstance(one, Pinned)}, self._noted(wanted, came)

    def _early_pins(self, early: Early, urgent: bool, stream: Stream, answer: _Answer) -> _Pins:
        """As `_pins`, of a window that is under way."""
        came = early.result()
        if came is None:
            return self._pins(early.records, urgent, answer)
        # What had no room may have some once nothing else is held.
        late = [i for i, one in enumerate(came) if one in _TOO_EARLY]
        if late:
            stream.give_up()
            again = self._pin([early.records[i] for i in late], urgent, answer.is_gone)
            for i, one in zip(late, again, strict=True):
                came[i] = one
        reasons = self._noted(early.records, came)
        return {one.name: one for one in came if isinstance(one, Pinned)}, reasons

    def _noted(
        self, wanted: Sequence[Record], came: Sequence[Pinned | Miss]
    ) -> dict[ObjectName, Reason]:
        """Takes note of what came; says of what did not why not."""
        outcomes = list(zip(wanted, came, strict=True))
        self._catalog.loaded([r for r, one in outcomes if isinstance(one, Pinned)])
        return {r.name: self._give_up(r, one) for r, one in outcomes if isinstance(one, Miss)}

    def _let_go(self, wanted: Sequence[Record], came: Sequence[Pinned | Miss]) -> None:
        """Ends with what was loaded ahead for a reader that has left."""
        self._noted(wanted, came)
        self._tiers.unpin(came)

    def _pin_early(
        self, records: Sequence[Record], is_gone: Callable[[], bool]
    ) -> list[Pinned | Miss]:
        return self._pin(records, records[0].name.kind is not Kind.KV, is_gone)

    def _pin(
        self, wanted: Sequence[Record], urgent: bool, is_gone: Callable[[], bool]
    ) -> list[Pinned | Miss]:
        """Pins objects; urgent ones pass others."""
        if not urgent:
            self._tiers.gate.wait()
        loading = sum(r.size for r in wanted if not r.in_cpu)
        if loading and self._tiers.pool_bytes - self._tiers.used_bytes < loading:
            self._catalog.make_room(loading)
        return self._tiers.pin(
            [(r.name, r.size) for r in wanted],
            urgent=urgent,
            timeout_s=self._timeout_s,
            is_gone=is_gone,
        )

    def _give_up(self, record: Record, miss: Miss) -> Reason:
        """Drops a record whose payload is really gone; says why it is not there."""
        if record.in_redis and miss in _MAY_COME_LATER:
            self._catalog.late([record])
            return _MAY_COME_LATER[miss]
        self._catalog.lost(record)
        damaged = miss is Miss.DAMAGED
        return pb.MISS_REASON_INTEGRITY if damaged else pb.MISS_REASON_EVICTED

    def _send_piece(
        self,
        piece: Piece,
        pinned: dict[ObjectName, Pinned],
        headers: dict[ObjectName, Header],
        reasons: dict[ObjectName, Reason],
        answer: _Answer,
    ) -> Generator[Frame, None, Reason]:
        """Sends one piece's rows; returns why it could not, or 0."""
        record = piece.record
        held = pinned.get(record.name) if record is not None else None
        if record is None or held is None:
            gone = pb.MISS_REASON_EVICTED
            return gone if record is None else reasons.get(record.name, gone)
        header = headers.get(record.name)
        if header is None:
            try:
                header = headers[record.name] = _header_of(held.data, record)
            except IntegrityError as error:
                logger.warning("dropped a damaged object: %s", error)
                self._catalog.count("integrity_errors")
                self._catalog.lost(record)
                self._tiers.delete([record.name])
                self._tiers.unpin(pinned.pop(record.name))
                reasons[record.name] = pb.MISS_REASON_INTEGRITY
                return pb.MISS_REASON_INTEGRITY
        for frame in _rows(piece, held, header, answer.frame_bytes):
            if piece.wanted.kind == pb.KIND_KV:
                self._tiers.gate.wait()
            answer.served_bytes += frame.payload_bytes
            yield frame
        return pb.MISS_REASON_UNSPECIFIED


def _check_ranges(ranges: Sequence[pb.Range]) -> None:
    """Refuses ranges that no object can answer.

    Raises:
        InvalidRequest: one is empty, backwards or of no kind, or there are too many.
    """
    if len(ranges) > MAX_RANGES:
        raise InvalidRequest(f"{len(ranges)} ranges, wanted at most {MAX_RANGES}")
    for number, wanted in enumerate(ranges):
        first, end = wanted.first_token, wanted.end_token
        if first >= end or int(wanted.kind) not in set(Kind):
            raise InvalidRequest(
                f"range {number} is of kind {int(wanted.kind)} [{first}, {end}), "
                f"wanted one of {[k.name for k in Kind]} and first_token < end_token"
            )


def _used(path: Path, ranges: Sequence[pb.Range], asked: dict[ObjectName, Record]) -> list[Record]:
    """What a fetch has used: all it has come to, and the keys and values before that."""
    used = dict(asked)
    end = max((r.end_token for r in ranges if r.kind == pb.KIND_KV), default=0)
    for record in records_on(path, Kind.KV):
        if record.first_token < end:
            used[record.name] = record
    return list(used.values())


def _header_of(data: memoryview, record: Record) -> Header:
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


def _rows(piece: Piece, held: Pinned, header: Header, frame_bytes: int) -> Iterator[Frame]:
    """Frames with a piece's rows, unit-major, each at most `frame_bytes` unless one unit is more.

    Rows that were not asked for never leave the store, so a reader of a shared prefix sees nothing
    of the sibling whose block it shares.
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


def _missing(piece: Piece, reason: Reason) -> Frame:
    return Frame(
        LaneRecord(
            RecordKind.MISSING,
            piece.number,
            code=reason,
            first_token=piece.first,
            rows=piece.end - piece.first,
        )
    )
