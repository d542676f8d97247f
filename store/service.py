"""The gRPC service: one method per RPC, errors of the tree as statuses, nothing decided here."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import DecodeError

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.auth import Role, allow
from tailreplay.store.errors import (
    IntegrityError,
    LimitExceeded,
    StoreUnavailable,
    TailReplayError,
)
from tailreplay.store.lane import Lane
from tailreplay.store.lane_tickets import TICKET_S, client_of_call
from tailreplay.store.lane_wire import LaneRecord, RecordKind

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import grpc

    from tailreplay.store.auth import Access, Principal
    from tailreplay.store.core import Store
    from tailreplay.store.frames import Frame


class StoreService(rpc.StoreServicer):
    """Serves one `Store` over gRPC; called from the server's worker threads.

    Args:
        store: what to serve; its owner closes it.
        lane: the data lane to hand out tickets for; None = there is none.
        access: says who a caller is.
        max_streams: Fetch and Put calls at a time; more are refused, so that lookups are answered
            whatever streams do.
    """

    def __init__(
        self, store: Store, lane: Lane | None, access: Access, *, max_streams: int
    ) -> None:
        self._store = store
        self._lane = lane
        self._access = access
        self._max_streams = max_streams
        # Guarded by _lock: open streams by tenant.
        self._lock = threading.Lock()
        self._streams: Counter[str] = Counter()

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchResponse:
        """Answers from the index."""
        with self._statuses(context):
            return self._store.match(request, self._reader(context))

    def Fetch(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchFrame]:
        """Streams rows; the lease ends with the stream."""
        # gRPC lets an answer fall that nobody waits for any more, and does not close it.
        return self._store.streams.guard(self._frames(request, context))

    def _frames(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Generator[pb.FetchFrame, None, None]:
        with self._statuses(context), self._stream(context) as caller:
            fetch = self._store.fetch(
                request,
                context.cancel,
                is_gone=lambda: not context.is_active(),
                caller=caller,
            )
            with closing(fetch) as frames:
                for frame in frames:
                    message = _message(frame)
                    if message is not None:
                        yield message

    def Put(
        self, request_iterator: Iterator[pb.PutFrame], context: grpc.ServicerContext
    ) -> pb.PutResponse:
        """Takes objects; answers once they are in the CPU tier."""
        with self._statuses(context), self._stream(context) as caller:
            return self._store.put(request_iterator, context.cancel, caller)

    def OpenLane(
        self, request: pb.OpenLaneRequest, context: grpc.ServicerContext
    ) -> pb.OpenLaneResponse:
        """Hands out a ticket for the data lane."""
        with self._statuses(context):
            if self._lane is None:
                raise StoreUnavailable("this store has no data lane (max_lanes is 0)")
            caller = self._reader(context)
            client = client_of_call(context)
            answer = pb.OpenLaneResponse(
                address=self._lane.address,
                ticket=self._lane.tickets.issue(client, caller),
                ticket_s=TICKET_S,
            )
            if self._store.tiers.shm_path and caller.shared_memory and not client.host:
                answer.segment = self._store.tiers.shm_path
                answer.segment_bytes = self._store.tiers.pool_bytes
            return answer

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        """Ends a lease early."""
        self._store.leases.end(request.lease_id)
        return pb.ReleaseResponse()

    def ReportDamage(
        self, request: pb.ReportDamageRequest, context: grpc.ServicerContext
    ) -> pb.ReportDamageResponse:
        """Looks at what came damaged."""
        with self._statuses(context):
            return self._store.report_damage(request, self._reader(context))

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:
        """Counts and sizes."""
        with self._statuses(context):
            allow(self._caller(context), Role.ADMIN, Role.METRICS)
            return self._store.stats()

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """Identity, settings and namespaces, as far as the caller may see them."""
        with self._statuses(context):
            return self._store.describe(self._caller(context))

    def _caller(self, context: grpc.ServicerContext) -> Principal:
        return self._access.principal(context.invocation_metadata())

    def _reader(self, context: grpc.ServicerContext) -> Principal:
        """A caller that may read and write objects."""
        caller = self._caller(context)
        allow(caller, Role.TENANT, Role.ADMIN)
        return caller

    @contextmanager
    def _stream(self, context: grpc.ServicerContext) -> Iterator[Principal]:
        """Counts a stream in; gives who it is of. A tenant has half of all streams at most."""
        caller = self._reader(context)
        share = self._max_streams if caller.role is Role.ANYONE else max(1, self._max_streams // 2)
        with self._lock:
            total, own = self._streams.total(), self._streams[caller.tenant]
            if total >= self._max_streams or own >= share:
                raise LimitExceeded(
                    f"{total} streams are open, {own} of them your own, wanted fewer than "
                    f"{self._max_streams} and {share} (max_workers allows no more)"
                )
            self._streams[caller.tenant] += 1
        try:
            yield caller
        finally:
            with self._lock:
                self._streams[caller.tenant] -= 1

    @contextmanager
    def _statuses(self, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            yield
        except TailReplayError as error:
            if isinstance(error, IntegrityError):
                self._store.catalog.count("integrity_errors")
            context.abort(error.code, str(error))


def add_store(server: grpc.Server, service: StoreService) -> None:
    """Registers a service.

    A frame of a Put that is no message counts as an empty one, and is refused as that. gRPC itself
    would end the call, and the end that our own refusal then puts to it is never over (grpcio
    1.78): the call would stay in memory, and the server could not be stopped any more.
    """
    rpc.add_StoreServicer_to_server(service, cast("grpc.Server", _Registrar(server)))


class _Registrar:
    """Stands for a server to which the Store service is added."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Nothing: the same handlers are registered by name."""

    def add_registered_method_handlers(
        self, service_name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        put: Any = handlers["Put"]
        forgiving = put._replace(request_deserializer=_put_frame)
        self._server.add_registered_method_handlers(service_name, {**handlers, "Put": forgiving})


def _put_frame(data: bytes) -> pb.PutFrame:
    try:
        return pb.PutFrame.FromString(data)
    except DecodeError:
        return pb.PutFrame()


def _message(frame: Frame) -> pb.FetchFrame | None:
    """A frame as gRPC carries it; None for what only the data lane needs."""
    record = frame.record
    if record.kind is RecordKind.ROWS:
        return pb.FetchFrame(rows=_rows(record, b"".join(frame.parts), frame.crc32c))
    if record.kind is RecordKind.MISSING:
        missing = pb.Missing(
            range=record.number,
            first_token=record.first_token,
            end_token=record.first_token + record.rows,
            reason=pb.MissReason.ValueType(record.code),
        )
        return pb.FetchFrame(missing=missing)
    if record.kind is RecordKind.RANGE_END:
        return pb.FetchFrame(range_end=pb.RangeEnd(range=record.number))
    if record.kind is RecordKind.LEASE:
        lease_id = bytes(frame.parts[0])
        lease = pb.LeaseGranted(lease_id=lease_id, stall_limit_ms=record.offset)
        return pb.FetchFrame(lease=lease)
    return None


def _rows(record: LaneRecord, data: bytes, crc32c: int) -> pb.Rows:
    return pb.Rows(
        range=record.number,
        first_unit=record.first_unit,
        units=record.units,
        first_token=record.first_token,
        rows=record.rows,
        data=data,
        crc32c=crc32c,
        tier=pb.Tier.ValueType(record.tier),
        row_bytes=record.row_bytes,
        prefix_hash=record.prefix_hash,
    )
