"""A store behind its listeners: gRPC for data and for operators, data lanes, HTTP for probes."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.access import let_group_in
from tailreplay.store.address import is_local, socket_path
from tailreplay.store.admin import ADMIN_SERVICE_NAME, add_admin
from tailreplay.store.auth import Access, Role
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.errors import NotAuthenticated, StoreUnavailable, from_rpc_error
from tailreplay.store.grpc_listener import GrpcListener, prepare_socket
from tailreplay.store.lane import Lane
from tailreplay.store.probes import Probes
from tailreplay.store.service import StoreService, add_store
from tailreplay.store.tls import ServerTls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tailreplay.store.objects import Kind

logger = logging.getLogger(__name__)

_WARM_UP_S = 10.0
_ADMIN_THREADS = 4

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Store"].full_name


class StoreServer:
    """One listening store; serves from construction until `stop`.

    Args:
        config: settings; `listen` with port 0 takes any free port.
        clock: as in `Store`.
        before_rows: as in `Store`.

    Attributes:
        address: where clients reach it.
        admin_address: where operators reach it; None = nowhere.
        http_address: where probes and scrapers reach it; None = nowhere.
        store: what it serves.

    Raises:
        StoreUnavailable: an address is taken.
        LimitExceeded: there is no room for a pool.
        ValueError: a token or TLS file can not be used.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        before_rows: Callable[[Kind], None] | None = None,
    ) -> None:
        self._access = Access(config.token_file)
        self._tls = _tls(config)
        self._lane: Lane | None = None
        self._listeners: list[GrpcListener] = []
        # Answers while the pool is being reserved, which may take a while.
        self._probes = _probes(config, self._access, self._tls)
        self.http_address = self._probes.address if self._probes is not None else None
        try:
            self.store = Store(config, clock=clock, before_rows=before_rows)
        except BaseException:
            if self._probes is not None:
                self._probes.close()
            raise
        try:
            self.address = self._listen(config)
            self.admin_address = self._listen_for_operators(config)
            for listener in self._listeners:
                listener.start()
            self._warm_up()
            if self._probes is not None:
                self._probes.ready(self.store)
        except BaseException:
            self._close(grace_s=0)
            raise
        _warn_of_open_doors(config, (self.address, self.admin_address, self.http_address))
        logger.info(
            "serving at %s: pool %d bytes, redis %s, tokens %s, tls %s; operators at %s, "
            "probes at %s",
            self.address,
            self.store.tiers.pool_bytes,
            self.store.redis_in_words(),
            "not asked for" if self._access.is_open else "asked for",
            _in_words(self._tls),
            self.admin_address,
            self.http_address,
        )

    def _listen(self, config: StoreConfig) -> str:
        listener = GrpcListener(
            config.listen,
            threads=config.max_workers,
            access=self._access,
            roles=(Role.TENANT, Role.ADMIN, Role.METRICS),
            tls=self._tls,
        )
        self._listeners.append(listener)
        prepare_socket(config.listen)  # a lane's socket lies in the same folder
        if config.max_lanes:
            self._lane = self._open_lane(config)
        max_streams = config.max_workers * 3 // 4
        service = StoreService(self.store, self._lane, self._access, max_streams=max_streams)
        add_store(listener.server, service)
        listener.bind(SERVICE_NAME)
        if config.listen.startswith("unix:"):
            let_group_in(socket_path(config.listen), config.access_gid, 0o660)
        return listener.address

    def _listen_for_operators(self, config: StoreConfig) -> str | None:
        if config.admin_address is None:
            return None
        listener = GrpcListener(
            config.admin_address,
            threads=_ADMIN_THREADS,
            access=self._access,
            roles=(Role.ADMIN,),
            tls=self._tls,
        )
        self._listeners.append(listener)
        add_admin(listener.server, self.store, self._access)
        listener.bind(ADMIN_SERVICE_NAME)
        return listener.address

    def _open_lane(self, config: StoreConfig) -> Lane:
        try:
            return Lane(
                self.store,
                config.listen,
                max_connections=config.max_lanes,
                access=self._access,
                tls=self._tls,
            )
        except OSError as error:
            raise StoreUnavailable(
                f"can not listen beside {config.listen!r} for data lanes: {error.strerror}"
            ) from error

    def _warm_up(self) -> None:
        """Spends on itself what the first call in a process costs, up to half a second.

        A call is made even if it is refused; where only TLS is spoken, at the door of operators.
        """
        plain = [a for a in (self.address, self.admin_address) if a and self._is_plain(a)]
        if not plain:
            return
        with grpc.insecure_channel(plain[0], options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = rpc.StoreStub(channel)
            try:
                stub.Describe(pb.DescribeRequest(), timeout=_WARM_UP_S, wait_for_ready=True)
            except grpc.RpcError as error:
                ours = from_rpc_error(error, plain[0])
                if not isinstance(ours, NotAuthenticated):
                    raise ours from error

    def _is_plain(self, address: str) -> bool:
        return self._tls is None or address.startswith("unix:")

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, lets what flows end for `grace_s` seconds, then closes the store.

        What flows are calls, requests on data lanes, and writes on their way to Redis.
        """
        if self._probes is not None:
            self._probes.drain()
        for listener in self._listeners:
            listener.drain()
        self._close(grace_s)

    def _close(self, grace_s: float) -> None:
        end_s = time.monotonic() + grace_s
        if self._lane is not None:
            self._lane.drain()
        for listener in self._listeners:
            listener.stop_taking(grace_s)
        for listener in self._listeners:
            listener.wait()
        if self._lane is not None:
            self._lane.close(max(0.0, end_s - time.monotonic()))
        for listener in self._listeners:
            listener.join()
        self.store.flush(max(0.0, end_s - time.monotonic()))
        if self._probes is not None:
            self._probes.close()
        self.store.close()


def _tls(config: StoreConfig) -> ServerTls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _probes(config: StoreConfig, access: Access, tls: ServerTls | None) -> Probes | None:
    return Probes(config.http_listen, access, tls) if config.http_listen is not None else None


def _warn_of_open_doors(config: StoreConfig, addresses: Iterable[str | None]) -> None:
    if config.tls_cert and config.token_file:
        return
    for address in addresses:
        if address is not None and not is_local(address):
            logger.warning("%s is open to the network without TLS or without tokens", address)


def _in_words(tls: ServerTls | None) -> str:
    if tls is None:
        return "off"
    return "on, with client certificates" if tls.asks_clients else "on"


@contextmanager
def serve_in_thread(
    *,
    clock: Callable[[], float] = time.monotonic,
    before_rows: Callable[[Kind], None] | None = None,
    **settings: object,
) -> Iterator[StoreServer]:
    """A store in this process, for tests and notebooks.

    Args:
        clock: as in `Store`.
        before_rows: as in `Store`.
        **settings: fields of `StoreConfig`; without `listen` it takes a socket in a fresh folder,
            without `pool_bytes` 64 MiB.

    Yields:
        The server; its `address` is what clients want.
    """
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        settings.setdefault("listen", f"unix://{os.path.join(folder, 'store.sock')}")
        settings.setdefault("pool_bytes", 64 << 20)
        config = StoreConfig.model_validate(settings)
        server = StoreServer(config, clock=clock, before_rows=before_rows)
        try:
            yield server
        finally:
            server.stop()
