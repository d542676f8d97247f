"""One gRPC server at one address: sockets, TLS, who is let in, health and reflection."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tailreplay.store.address import socket_path
from tailreplay.store.auth import Access, Role, allow
from tailreplay.store.errors import StoreUnavailable, TailReplayError
from tailreplay.store.health_service import HEALTH_SERVICE_NAME, HealthService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.tls import ServerTls

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message either side accepts, bytes."""

_MAX_CALLS = 1024
"""Calls that run or wait at a time; more are refused rather than kept in memory."""

_OPEN = f"/{HEALTH_SERVICE_NAME}/Check"
_HANDSHAKE_MS = 10_000
_PATIENCE_S = 5.0
"""How long calls that were cancelled may take to end."""


class GrpcListener:
    """Listens from `start` until `stop`.

    Args:
        address: unix:///path or host:port; port 0 takes any free one.
        threads: that serve calls.
        access: says who a caller is.
        roles: those that are let in; everybody may ask for health.
        tls: for TCP; None = in the clear.

    Attributes:
        address: where clients reach it; known once `bind` was called.
        server: to register services on before `bind`.
    """

    def __init__(
        self,
        address: str,
        *,
        threads: int,
        access: Access,
        roles: Sequence[Role],
        tls: ServerTls | None,
    ) -> None:
        self.address = address
        self._tls = None if address.startswith("unix:") else tls
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="store-rpc")
        self._health = HealthService(())
        self._started = False
        self._over = threading.Event()
        self._until_s = 0.0
        self.server = grpc.server(
            self._workers,
            interceptors=[] if access.is_open else [_Guard(access, roles)],
            maximum_concurrent_rpcs=_MAX_CALLS,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ],
        )

    def bind(self, *services: str) -> None:
        """Takes the address, and names the services whose health is to be told.

        Raises:
            StoreUnavailable: the address is taken.
        """
        self._health = HealthService(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*services, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )
        prepare_socket(self.address)
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise StoreUnavailable(f"can not listen at {self.address!r}: {error}") from error
        if self.address.startswith("unix:"):
            os.chmod(socket_path(self.address), 0o600)
        else:
            self.address = f"{self.address.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Begins to serve."""
        self.server.start()
        self._started = True

    def drain(self) -> None:
        """Says to whoever asks for health that it is going away."""
        self._health.drain()

    def stop_taking(self, grace_s: float) -> None:
        """Refuses new calls from now on, and lets running ones end for `grace_s` seconds."""
        grace_s = grace_s if self._started else 0
        self._until_s = time.monotonic() + grace_s + _PATIENCE_S
        self._over = self.server.stop(grace_s)

    def wait(self) -> None:
        """Waits until calls have ended, or should have.

        In grpcio 1.78 a call to which an end is put twice is never over; a store that was told to
        stop does not wait for that.
        """
        if not self._over.wait(max(0.0, self._until_s - time.monotonic())):
            logger.warning("calls at %s have not ended, stopping without them", self.address)

    def join(self) -> None:
        """Waits for handlers that still run: they read the pool's memory."""
        self._workers.shutdown()

    def _add_port(self) -> int:
        if self._tls is None:
            return self.server.add_insecure_port(self.address)
        return self.server.add_secure_port(self.address, self._tls.grpc_credentials())


class _Guard(grpc.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Lets nobody in but those whose token is of one of the roles."""

    def __init__(self, access: Access, roles: Sequence[Role]) -> None:
        self._access = access
        self._roles = roles

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method != _OPEN:
            try:
                caller = self._access.principal(handler_call_details.invocation_metadata)
                allow(caller, *self._roles)
            except TailReplayError as error:
                return _refusal(error)
        return continuation(handler_call_details)


def _refusal(error: TailReplayError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that reads nothing of the call, whatever its kind, and answers with an error."""

    def refuse(_: object, context: grpc.ServicerContext) -> None:
        context.abort(error.code, str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def prepare_socket(address: str) -> None:
    """Makes the folder of a Unix socket, private to this user, and clears a dead socket away.

    Raises:
        StoreUnavailable: something else is there.
    """
    if not address.startswith("unix:"):
        return
    path = Path(socket_path(address))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_socket():
            raise StoreUnavailable(f"can not listen at {path}: it is no socket")
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"can not listen at {path}: {error.strerror}") from error
