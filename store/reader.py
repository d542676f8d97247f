"""Fetch: sends rows of stored objects in the order asked for, pinning a window at a time."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.frames import Frame, check_piece, header_for, missing, rows_of
from tailreplay.store.lane_wire import LaneRecord, RecordKind
from tailreplay.store.look_ahead import Early, LookAhead, Stream
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pin_budget import PinBudget
from tailreplay.store.window_pins import Held, WindowPins
from tailreplay.store.windows import Piece, is_urgent, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.damage import Damage
    from tailreplay.store.header import Header
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Path
    from tailreplay.store.window_pins import Reason

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2 << 20
"""Most payload in one frame, bytes; far below gRPC's message limit of 16 MiB."""

MAX_RANGES = 4096
"""Most ranges of one request."""

_PLACED_SHARE = 4
_PLACED_FRAME_BYTES = 1 << 30


@dataclass(slots=True)
class _Answer:
    """One answer on its way.

    Attributes:
        placed: whether its rows are placed in shared memory, where their reader checks nothing.
        frame_bytes: most payload in a frame.
        is_gone: whether its reader has left.
        dead: ranges of which no more follows.
        served_bytes: payload offered since that was last counted.
    """

    placed: bool
    frame_bytes: int
    is_gone: Callable[[], bool]
    dead: set[int] = field(default_factory=set)
    served_bytes: int = 0


class PinLimits(NamedTuple):
    """How much readers pin at a time, and how long they wait for it.

    Attributes:
        window_bytes: bytes of objects of the window that one stream sends.
        ahead_windows: windows that it has loaded from Redis meanwhile.
        leased_bytes: bytes of all streams.
        timeout_s: longest wait for one window to come from Redis, or for other streams' pins.
    """

    window_bytes: int
    ahead_windows: int
    leased_bytes: int
    timeout_s: float


class Reader:
    """Serves Fetch streams.

    Args:
        catalog: what exists.
        tiers: where it is.
        damage: takes what is found damaged.
        limits: how much is pinned at a time, and how long a window may take.
        before_rows: called before the rows of each piece are sent; tests hold bulk rows back here.
        verify_placed: whether rows are checked before they are placed in shared memory, too.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        damage: Damage,
        limits: PinLimits,
        before_rows: Callable[[Kind], None] | None = None,
        verify_placed: bool = False,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._damage = damage
        self._window_bytes = min(limits.window_bytes, limits.leased_bytes)
        self._leased_bytes = limits.leased_bytes
        self._budget = PinBudget(limits.leased_bytes)
        self._timeout_s = limits.timeout_s
        self._before_rows = before_rows
        self._verify_placed = verify_placed
        self._pins = WindowPins(catalog, tiers, limits.timeout_s)
        self._ahead = LookAhead(
            self._pins.early,
            self._pins.let_go,
            self._budget,
            limits.ahead_windows,
            self._window_bytes,
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
        answer = _Answer(placed, _PLACED_FRAME_BYTES if placed else MAX_FRAME_BYTES, is_gone)
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
        for record in path.of(Kind(wanted.kind)):
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
                urgent = is_urgent(live)
                objects = list(records.values())
                with (
                    self._tiers.gate.urgent() if urgent else nullcontext(),
                    self._hold(objects, early, urgent, stream, answer) as held,
                ):
                    yield from self._send_held(live, held, stream.begin, answer)
                return
        for piece in live:
            if piece.number not in answer.dead:
                answer.dead.add(piece.number)
                yield missing(piece, pb.MISS_REASON_DEADLINE)

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

    def _hold(
        self,
        records: Sequence[Record],
        early: Early | None,
        urgent: bool,
        stream: Stream,
        answer: _Answer,
    ) -> AbstractContextManager[Held]:
        """A window's objects, from what is under way of it, if anything is."""
        if early is None:
            return self._pins.of(records, urgent, answer.is_gone)
        return self._pins.of_early(early, urgent, stream, answer.is_gone)

    def _send_held(
        self,
        live: Sequence[Piece],
        held: Held,
        begin_next: Callable[[], None],
        answer: _Answer,
    ) -> Iterator[Frame]:
        headers: dict[ObjectName, Header] = {}
        try:
            begin_next()
            for piece in live:
                if piece.number in answer.dead:
                    continue
                if self._before_rows is not None:
                    self._before_rows(Kind(piece.wanted.kind))
                why = yield from self._send_piece(piece, held, headers, answer)
                if why:
                    answer.dead.add(piece.number)
                    yield missing(piece, why)
                elif piece.last:
                    yield Frame(LaneRecord(RecordKind.RANGE_END, piece.number))
            yield Frame(LaneRecord(RecordKind.BARRIER))
        finally:
            self._catalog.count("served_bytes", answer.served_bytes)
            answer.served_bytes = 0

    def _send_piece(
        self,
        piece: Piece,
        held: Held,
        headers: dict[ObjectName, Header],
        answer: _Answer,
    ) -> Generator[Frame, None, Reason]:
        """Sends one piece's rows; returns why it could not, or 0."""
        record = piece.record
        pinned = held.pinned.get(record.name) if record is not None else None
        if record is None or pinned is None:
            gone = pb.MISS_REASON_EVICTED
            return gone if record is None else held.reasons.get(record.name, gone)
        header = headers.get(record.name)
        try:
            if header is None:
                header = headers[record.name] = header_for(pinned.data, record)
            if self._verify_placed or not answer.placed:
                check_piece(piece, pinned, header, every=answer.placed)
        except IntegrityError as error:
            logger.debug("damage in the pool: %s", error)
            self._damage.drop(record, pinned.source)
            self._tiers.unpin(held.pinned.pop(record.name))
            held.reasons[record.name] = pb.MISS_REASON_INTEGRITY
            return pb.MISS_REASON_INTEGRITY
        for frame in rows_of(piece, pinned, header, answer.frame_bytes):
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
    for record in path.kv:
        if record.first_token < end:
            used[record.name] = record
    return list(used.values())
