"""What a store says of itself over HTTP: whether it lives, whether it serves, and its figures."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tailreplay.store.auth import BEARER, Role, allow
from tailreplay.store.errors import NotAllowed, NotAuthenticated
from tailreplay.store.http_listener import Answer, HttpListener
from tailreplay.store.metrics import StoreMetrics

if TYPE_CHECKING:
    from tailreplay.store.auth import Access
    from tailreplay.store.core import Store
    from tailreplay.store.tls import ServerTls


class Probes:
    """Answers probes from construction on, and metrics once there is a store.

    Args:
        address: host:port.
        access: who may read figures; probes are answered to everybody.
        tls: None = in the clear.

    Raises:
        StoreUnavailable: the address is taken.
    """

    def __init__(self, address: str, access: Access, tls: ServerTls | None) -> None:
        self._access = access
        self._registry = CollectorRegistry()
        # Set once each, by the thread that starts and stops the server.
        self._store: Store | None = None
        self._state = "starting"
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        self._http = HttpListener(address, pages, tls)
        self.address = self._http.address

    def ready(self, store: Store) -> None:
        """Says from now on that the store serves."""
        StoreMetrics(self._registry, store.stats, version("tailreplay"), store.boot_id)
        self._store = store
        self._state = "ready"

    def drain(self) -> None:
        """Says from now on that no new traffic should come."""
        self._state = "draining"

    def close(self) -> None:
        """Stops answering."""
        self._http.close()

    def _healthz(self, _: str) -> Answer:
        # Goes through the locks of the catalog and the pool: a store that hangs there is not alive.
        if self._store is not None:
            self._store.stats()
        return Answer(200, b"alive\n")

    def _readyz(self, _: str) -> Answer:
        # Redis does not count: without it the store still serves what it has.
        return Answer(200 if self._state == "ready" else 503, f"{self._state}\n".encode())

    def _metrics(self, authorization: str) -> Answer:
        try:
            if not self._access.is_open:
                caller = self._access.bearer(authorization.removeprefix(BEARER))
                allow(caller, Role.METRICS, Role.ADMIN)
        except NotAuthenticated as error:
            return Answer(401, f"{error}\n".encode())
        except NotAllowed as error:
            return Answer(403, f"{error}\n".encode())
        return Answer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
