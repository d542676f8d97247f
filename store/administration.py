"""What operators can do with a store, put together, and kept up with other stores of its Redis."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from tailreplay.store.chain import digest_key
from tailreplay.store.eraser import Eraser
from tailreplay.store.erasure_ledger import ErasureLedger
from tailreplay.store.erasures import Erasures
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.forgetter import Forgetter
from tailreplay.store.ledger import Ledger
from tailreplay.store.operator_pins import OperatorPins
from tailreplay.store.operators import Operators
from tailreplay.store.publisher import Publisher
from tailreplay.store.redis_settings import redis_tables
from tailreplay.store.shared_names import SharedNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.client_names import ClientNames
    from tailreplay.store.config import StoreConfig
    from tailreplay.store.eraser import Erased
    from tailreplay.store.erasure_ledger import Erasure
    from tailreplay.store.tiers import Tiers

logger = logging.getLogger(__name__)


class Administration:
    """Everything behind the Admin service. Thread-safe.

    Args:
        config: the store's settings.
        catalog: what exists.
        tiers: where it is.
        client_names: what clients call namespaces.
        store_id: tells the store from others of its Redis.
        clock: seconds that only grow.

    Attributes:
        operators: pins, quotas, modes and inspection.
        forgetter: clears and erases.
        publisher: says what all tenants may read.
        erasures: those of all stores.
    """

    def __init__(
        self,
        config: StoreConfig,
        catalog: Catalog,
        tiers: Tiers,
        client_names: ClientNames,
        *,
        store_id: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._catalog, self._client_names = catalog, client_names
        self._tables = redis_tables(config)
        ledger = erasure_ledger = None
        if self._tables is not None:
            ledger = Ledger(self._tables, secret=config.digest_secret)
            erasure_ledger = ErasureLedger(self._tables, store_id)
        self._names = SharedNames(client_names, catalog, ledger, clock)
        pins = OperatorPins(
            catalog,
            tiers,
            most_bytes=int(tiers.pool_bytes * config.pinned_share),
            timeout_s=config.tier_timeout_s,
            clock=clock,
        )
        self.operators = Operators(
            catalog,
            tiers,
            ledger,
            pins,
            digest_key=partial(digest_key, secret=config.digest_secret),
            clock=clock,
        )
        self._eraser = Eraser(catalog, tiers, ledger)
        self.erasures = Erasures(erasure_ledger, self._eraser, self._erase_here)
        self.forgetter = Forgetter(
            catalog.quotas, self.operators, ledger, self._eraser, self.erasures
        )
        self.publisher = Publisher(
            catalog,
            self.erasures,
            ledger,
            client_names,
            has_tenants=config.token_file is not None,
            clock=clock,
        )

    def join(self) -> None:
        """Takes over what holds for all stores, before the first request."""
        try:
            self.publisher.refresh()
            self.erasures.join()
            self._names.ask()
        except StoreUnavailable as error:
            logger.debug("what holds for all stores is not known yet: %s", error)

    def forget_names(self) -> None:
        """Forgets what clients call namespaces that have nothing any more."""
        self._client_names.keep_only(self._catalog.spaces())

    def redis_lost(self) -> None:
        """Says anew what stores say in Redis by themselves, since it may have lost it."""
        self.erasures.redis_lost()
        self.operators.redis_lost()
        self._names.redis_lost()

    def tick(self) -> None:
        """Does what is to be done again and again; may wait for Redis."""
        self.erasures.tick()
        self.operators.tick()
        self.publisher.tick()
        self._names.tick()

    def close(self, *, has_redis: bool) -> None:
        """Leaves the other stores, and closes connections.

        Args:
            has_redis: whether Redis answers; else nobody waits for it here.
        """
        if has_redis:
            self.operators.close()
            self.erasures.leave()
        if self._tables is not None:
            self._tables.close()

    def _erase_here(self, erasure: Erasure) -> Erased:
        """Takes out what this store has of what is to be erased everywhere."""
        if not erasure.block:
            return self.forgetter.erase_here(erasure)
        self.publisher.refresh()  # or what is closed would be spared as open
        (namespace,) = erasure.namespaces
        return self._eraser.drop_prefix(namespace, erasure.block)
