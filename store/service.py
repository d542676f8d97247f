"""The gRPC service: one method per RPC, errors of the tree as statuses, nothing decided here."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.errors import IntegrityError, TailReplayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from tailreplay.store.core import Store


class StoreService(rpc.StoreServicer):
    """Serves one `Store` over gRPC; called from the server's worker threads.

    Args:
        store: what to serve; its owner closes it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchResponse:
        """Answers from the index."""
        with self._statuses(context):
            return self._store.match(request)

    def Fetch(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchFrame]:
        """Streams rows; the lease ends with the stream."""
        with self._statuses(context):
            yield from self._store.fetch(request, context.cancel)

    def Put(
        self, request_iterator: Iterator[pb.PutFrame], context: grpc.ServicerContext
    ) -> pb.PutResponse:
        """Takes objects; answers once they are in the CPU tier."""
        with self._statuses(context):
            return self._store.put(request_iterator)

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        """Ends a lease early."""
        self._store.leases.end(request.lease_id)
        return pb.ReleaseResponse()

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:
        """Counts and sizes."""
        with self._statuses(context):
            return self._store.stats()

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """Identity and settings."""
        with self._statuses(context):
            return self._store.describe(version("tailreplay"))

    @contextmanager
    def _statuses(self, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            yield
        except TailReplayError as error:
            if isinstance(error, IntegrityError):
                self._store.catalog.count("integrity_errors")
            context.abort(error.code, str(error))
