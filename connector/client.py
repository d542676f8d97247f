"""The client of a store: every call has a deadline, and a breaker stops asking a dead one."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc

from tailreplay.connector.breaker import Breaker
from tailreplay.connector.fetch_stream import FetchStream, noted
from tailreplay.connector.lane import Lanes
from tailreplay.connector.put_frames import put_frames
from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.address import checked_address
from tailreplay.store.credentials import NO_CREDENTIALS, Credentials
from tailreplay.store.errors import StoreUnavailable, from_rpc_error
from tailreplay.store.tls_probe import tls_fault
from tailreplay.store.tokens import to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailreplay.connector.lane_stream import LaneStream
    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.store.objects import Kind
    from tailreplay.store.tokens import ExtendedTokens

    Ping: TypeAlias = grpc.UnaryUnaryMultiCallable[bytes, bytes]

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 16 << 20

# Within its deadline a call that changes nothing is made again: the first one after a restart of
# the store may go into a connection whose end nobody has noticed yet.
_ASK_AGAIN = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": "tailreplay.store.v1.Store", "method": method}
                    for method in ("Match", "OpenLane", "Stats", "Describe")
                ],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.01s",
                    "maxBackoff": "0.05s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

_HEALTH = "/grpc.health.v1.Health/Check"
_NOT_REACHED = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)

T = TypeVar("T")


class NotAsked(StoreUnavailable):
    """No call was made, because the store failed just before."""


class StoreClient:
    """A connection to one store. Thread-safe; made and closed without the store being there.

    Args:
        address: unix:///path/to.sock or host:port.
        match_timeout_s: deadline of Match, unless a call says otherwise.
        call_timeout_s: deadline of other unary calls.
        lanes: whether payload goes over data lanes where the store has them, else gRPC alone.
        credentials: who the client is, and whom it takes for the store.
        clock: seconds that only grow, for the breaker.

    Raises:
        ValueError: `address` is none, or the credentials do not go with it.
    """

    def __init__(
        self,
        address: str,
        *,
        match_timeout_s: float = 0.25,
        call_timeout_s: float = 5.0,
        lanes: bool = True,
        credentials: Credentials = NO_CREDENTIALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = checked_address(address)
        self._match_timeout_s = match_timeout_s
        self._call_timeout_s = call_timeout_s
        self._breaker = Breaker(f"store at {address}", clock, on_open=self._look_at_tls)
        # Of its own, or a store that answers lookups but whose streams stall would stall them all.
        self._stream_breaker = Breaker(f"streams of the store at {address}", clock)
        self._credentials = credentials
        self._channel = credentials.channel(
            address,
            [
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
                # A store that comes back is found by the next lookup, within its deadline.
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 5000),
                ("grpc.max_reconnect_backoff_ms", 200),
                ("grpc.service_config", _ASK_AGAIN),
                # A connection of its own, whose end is its own to notice.
                ("grpc.use_local_subchannel_pool", 1),
                # Proxies are for the outside; a store is on this machine or in this cluster.
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._stub = rpc.StoreStub(self._channel)
        self._ping: Ping = self._channel.unary_unary(_HEALTH)
        self._lanes = Lanes(address, self._open_lane if lanes else None, credentials.context())

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, timeout_s: float) -> bool:
        """Waits until the store answers; False when it does not in time."""
        # Asked for its health, not watched for readiness: the watch is a thread of grpcio's that
        # dies of an exception when the channel is closed under it, or else holds the closing up.
        try:
            self._ping(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in _NOT_REACHED:
                return False
        # Opened now, so that no fetch waits for it.
        lane = self._lanes.take()
        if lane is not None:
            self._lanes.give_back(lane)
        return True

    def match(
        self, namespace: bytes, tokens: ExtendedTokens, *, timeout_s: float | None = None
    ) -> pb.MatchResponse:
        """What the store holds along the longest stored prefix of `tokens`.

        Args:
            namespace: 32 bytes.
            tokens: the prompt.
            timeout_s: in place of the client's `match_timeout_s`.

        Raises:
            StoreUnavailable: it is absent or slow, or the breaker is open.
            InvalidRequest: it does not take the namespace or the tokens.
        """
        request = pb.MatchRequest(namespace=namespace, tokens=to_wire(tokens))
        deadline_s = self._match_timeout_s if timeout_s is None else timeout_s
        # Waiting within the deadline finds a store that is just coming back.
        return self._call(
            lambda: self._stub.Match(request, timeout=deadline_s, wait_for_ready=True)
        )

    def fetch(
        self, namespace: bytes, leaf: bytes, ranges: Iterable[pb.Range], *, timeout_s: float
    ) -> FetchStream | LaneStream:
        """Starts a Fetch, over a data lane where the store has one; errors come out of the stream.

        Raises:
            StoreUnavailable: the breaker is open.
        """
        self._check(self._stream_breaker)
        request = pb.FetchRequest(namespace=namespace, leaf=leaf, ranges=ranges)
        report = partial(self.report_damage, namespace, leaf)
        stream = self._lanes.fetch(request, self._stream_breaker, timeout_s, report)
        if stream is not None:
            return stream
        call = self._stub.Fetch(request, timeout=timeout_s)
        return FetchStream(call, self._stream_breaker, self.address, report)

    def report_damage(self, namespace: bytes, leaf: bytes, kind: Kind, prefix_hash: bytes) -> bool:
        """Says that rows of an object came damaged; the store looks for itself. Never raises.

        Args:
            namespace: 32 bytes.
            leaf: that they were fetched along.
            kind: of the object.
            prefix_hash: its name.

        Returns:
            Whether the store has found and dropped it.
        """
        request = pb.ReportDamageRequest(
            namespace=namespace, leaf=leaf, kind=pb.Kind.ValueType(kind), prefix_hash=prefix_hash
        )
        try:
            return self._stub.ReportDamage(request, timeout=self._call_timeout_s).damaged
        except grpc.RpcError as error:  # a store that is older does not know the call
            logger.debug("damage is not reported: %s", from_rpc_error(error, self.address))
            return False

    def put(
        self,
        namespace: bytes,
        tokens: ExtendedTokens,
        objects: Iterable[ObjectBytes],
        *,
        timeout_s: float,
        tenant: bytes = b"",
    ) -> pb.PutResponse:
        """Stores objects of one prefix; returns once they are in the store's memory.

        Args:
            namespace: 32 bytes.
            tokens: the whole prefix that the objects belong to.
            objects: what to store.
            timeout_s: deadline.
            tenant: digest of the tenant whose namespace it is, for quotas and erasure.

        Raises:
            StoreUnavailable: it is absent or slow, or the breaker is open.
            InvalidRequest, GeometryMismatch, IntegrityError, LimitExceeded: it refuses an object.
            Exception: what an object's `parts` raise; it does not count against the store.
        """
        self._check(self._breaker)
        begin = pb.PutBegin(namespace=namespace, tokens=to_wire(tokens), tenant=tenant)
        offered = list(objects)
        answer = self._lanes.put(begin, offered, timeout_s)
        if answer is not None:
            self._breaker.succeeded()
            return answer
        return self._try(lambda: self._put_by_grpc(begin, offered, timeout_s))

    def _put_by_grpc(
        self, begin: pb.PutBegin, objects: Sequence[ObjectBytes], timeout_s: float
    ) -> pb.PutResponse:
        """GRPC asks for frames on a thread of its own, and would only say that they have ended."""
        faults: list[Exception] = []
        try:
            return self._stub.Put(put_frames(begin, objects, faults), timeout=timeout_s)
        except grpc.RpcError:
            if faults:
                raise faults[0] from None
            raise

    def release(self, lease_id: bytes) -> None:
        """Ends a lease early.

        Raises:
            StoreUnavailable: the store is absent or slow.
        """
        request = pb.ReleaseRequest(lease_id=lease_id)
        self._call(lambda: self._stub.Release(request, timeout=self._call_timeout_s))

    def stats(self) -> pb.StatsResponse:
        """Counters and sizes.

        Raises:
            StoreUnavailable: the store is absent or slow.
        """
        return self._call(lambda: self._stub.Stats(pb.StatsRequest(), timeout=self._call_timeout_s))

    def describe(self) -> pb.DescribeResponse:
        """Identity and settings.

        Raises:
            StoreUnavailable: the store is absent or slow.
        """
        request = pb.DescribeRequest()
        return self._call(lambda: self._stub.Describe(request, timeout=self._call_timeout_s))

    def _look_at_tls(self) -> None:
        """Says in the log if it is TLS that does not let them come together."""

        def look() -> None:
            if fault := tls_fault(self.address, self._credentials, flag=""):
                logger.warning("%s", fault)

        if not self.address.startswith("unix:"):
            threading.Thread(target=look, name="tls-look", daemon=True).start()

    def close(self) -> None:
        """Ends every call and the connection."""
        self._lanes.close()
        self._channel.close()

    def _open_lane(self) -> pb.OpenLaneResponse:
        return self._stub.OpenLane(pb.OpenLaneRequest(), timeout=self._match_timeout_s)

    def _check(self, breaker: Breaker) -> None:
        if not breaker.allows():
            raise NotAsked(f"store at {self.address}: not asked, it failed just before")

    def _call(self, call: Callable[[], T]) -> T:
        self._check(self._breaker)
        return self._try(call)

    def _try(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except grpc.RpcError as error:
            raise noted(self._breaker, error, self.address) from error
        self._breaker.succeeded()
        return answer


def default_address() -> str:
    """The sidecar's socket, unless TAILREPLAY_LISTEN names another address."""
    from tailreplay.store.config import default_socket

    return os.environ.get("TAILREPLAY_LISTEN") or default_socket()
