"""A store behind a gRPC server, with standard health and reflection."""

from __future__ import annotations

import logging
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.address import socket_path
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.errors import StoreUnavailable, from_rpc_error
from tailreplay.store.lane import Lane
from tailreplay.store.service import StoreService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.store.objects import Kind

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message either side accepts, bytes."""

_WARM_UP_S = 10.0

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Store"].full_name


class StoreServer:
    """One listening store; serves from construction until `stop`.

    Args:
        config: settings; `listen` with port 0 takes any free port.
        before_rows: as in `Store`.

    Attributes:
        address: where clients reach it.
        store: what it serves.

    Raises:
        StoreUnavailable: the address is taken.
        LimitExceeded: there is no room for a pool.
    """

    def __init__(
        self, config: StoreConfig, *, before_rows: Callable[[Kind], None] | None = None
    ) -> None:
        self.store = Store(config, before_rows=before_rows)
        self._lane: Lane | None = None
        self._workers = ThreadPoolExecutor(config.max_workers, thread_name_prefix="store-rpc")
        self._server: grpc.Server | None = None
        try:
            self._server, self.address = self._listen(config)
            self._server.start()
            self._warm_up()
        except BaseException:
            self._close(grace_s=0)
            raise
        logger.info(
            "serving at %s: pool %d bytes, redis %s",
            self.address,
            self.store.tiers.pool_bytes,
            self.store.redis_in_words(),
        )

    def _listen(self, config: StoreConfig) -> tuple[grpc.Server, str]:
        server = grpc.server(
            self._workers,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        _prepare_socket(config.listen)
        if config.max_lanes:
            self._lane = self._open_lane(config)
        service = StoreService(self.store, self._lane, max_streams=config.max_workers * 3 // 4)
        rpc.add_StoreServicer_to_server(service, server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            [SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        try:
            port = server.add_insecure_port(config.listen)
        except RuntimeError as error:
            raise StoreUnavailable(f"can not listen at {config.listen!r}: {error}") from error
        if config.listen.startswith("unix:"):
            return server, config.listen
        return server, f"{config.listen.rpartition(':')[0]}:{port}"

    def _open_lane(self, config: StoreConfig) -> Lane:
        try:
            return Lane(self.store, config.listen, max_connections=config.max_lanes)
        except OSError as error:
            raise StoreUnavailable(
                f"can not listen beside {config.listen!r} for data lanes: {error}"
            ) from error

    def _warm_up(self) -> None:
        """Spends on itself what the first call in a process costs, up to half a second."""
        with grpc.insecure_channel(
            self.address, options=[("grpc.enable_http_proxy", 0)]
        ) as channel:
            stub = rpc.StoreStub(channel)
            try:
                stub.Describe(pb.DescribeRequest(), timeout=_WARM_UP_S, wait_for_ready=True)
            except grpc.RpcError as error:
                raise from_rpc_error(error, self.address) from error

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, lets running ones end for `grace_s` seconds, then closes the store."""
        self._health.enter_graceful_shutdown()
        self._close(grace_s)

    def _close(self, grace_s: float) -> None:
        if self._server is not None:
            self._server.stop(grace_s).wait()
        if self._lane is not None:
            self._lane.close()
        self._workers.shutdown()  # a handler that still runs reads the pool's memory
        self.store.close()


def _prepare_socket(address: str) -> None:
    """Makes the folder of a Unix socket, private to this user, and clears a dead socket away."""
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


@contextmanager
def serve_in_thread(
    *, before_rows: Callable[[Kind], None] | None = None, **settings: object
) -> Iterator[StoreServer]:
    """A store in this process, for tests and notebooks.

    Args:
        before_rows: as in `Store`.
        **settings: fields of `StoreConfig`; without `listen` it takes a socket in a fresh folder,
            without `pool_bytes` 64 MiB.

    Yields:
        The server; its `address` is what clients want.
    """
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        settings.setdefault("listen", f"unix://{os.path.join(folder, 'store.sock')}")
        settings.setdefault("pool_bytes", 64 << 20)
        server = StoreServer(StoreConfig.model_validate(settings), before_rows=before_rows)
        try:
            yield server
        finally:
            server.stop()
