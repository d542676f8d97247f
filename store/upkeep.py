"""What a store does by itself, again and again, on threads of its own."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from tailreplay.store.census import Census
from tailreplay.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.administration import Administration
    from tailreplay.store.catalog import Catalog
    from tailreplay.store.leases import Leases
    from tailreplay.store.refill import Refill
    from tailreplay.store.tiers import Tiers

logger = logging.getLogger(__name__)

_KEEP_UP_EVERY_S = 0.5
_FORGET_EVERY_S = 10.0
_FORGET_PAUSE_S = 0.001


class Upkeep:
    """Ends stalled streams, lists what Redis has, and keeps both in step.

    Args:
        catalog: what exists.
        tiers: where it is.
        admin: what operators have decided.
        leases: of streams, to be ended when they stall.
        refill: makes up for what Redis loses; None without Redis.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        admin: Administration,
        *,
        leases: Sequence[Leases],
        refill: Refill | None,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._admin = admin
        self._leases = leases
        self._clock = clock
        self._closing = threading.Event()
        self._census = Census(catalog, tiers, clock) if refill is not None else None
        # Apart, since all but the first may wait for Redis, and stalled streams must not.
        work = {"tick": self._tick, "keep-up": self._keep_up}
        self._refill = refill
        if refill is not None:
            work["refill"] = lambda: refill.run(self._closing)
        self._threads = [
            threading.Thread(target=target, name=f"store-{name}", daemon=True)
            for name, target in work.items()
        ]
        self._restored = False

    def start(self) -> None:
        """Lists what Redis has, and begins."""
        if self._refill is not None:
            self._refill.begin()  # or what is lost behind the listing would not be noticed
        self._restored = self._restore()
        if self._restored:
            self._admin.join()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends it, and waits for that."""
        self._closing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _restore(self) -> bool:
        """Lists what Redis has; says whether that was everything."""
        try:
            listed = self._catalog.redis.restore()
        except StoreUnavailable as error:
            logger.debug("nothing restored yet: %s", error)
            return False
        if listed:
            logger.info("restored %d objects from Redis", listed)
        return self._catalog.redis.is_whole

    def _renew_used(self) -> None:
        try:
            self._catalog.redis.renew_used()
        except StoreUnavailable as error:
            logger.debug("what is used was not renewed in Redis: %s", error)

    def _forget_expired(self) -> None:
        """A little at a time, so that lookups come between."""
        row = self._catalog.redis.forget_expired(0)
        while row and not self._closing.wait(_FORGET_PAUSE_S):
            row = self._catalog.redis.forget_expired(row)

    def _tick(self) -> None:
        """Ends stalled streams; waits for nothing else."""
        interval_s = min(0.5, self._leases[0].stall_limit_s / 2)
        while not self._closing.wait(interval_s):
            for leases in self._leases:
                leases.expire()

    def _keep_up(self) -> None:
        """Does what is to be done again and again, and may wait for Redis."""
        forget_at_s = self._clock() + _FORGET_EVERY_S
        while not self._closing.wait(_KEEP_UP_EVERY_S):
            self._admin.tick()
            self._renew_used()
            if self._census is not None:
                self._census.tick()
            if self._clock() >= forget_at_s:
                self._forget_expired()
                self._admin.forget_names()
                forget_at_s = self._clock() + _FORGET_EVERY_S
            if not self._restored and self._tiers.redis_status().get("healthy"):
                self._restored = self._restore()
