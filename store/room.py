"""Room in the CPU tier: who may have more of it, what is evicted for that, and what never is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tailreplay.store.batches import batches
from tailreplay.store.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailreplay.store.holdings import Holdings
    from tailreplay.store.quota import Limits
    from tailreplay.store.tiers import Tiers


_RANKED = 4096
"""Objects whose last use is looked up under one hold of the lock."""


class Room:
    """Evicts from the tiers, and notes what has gone. Thread-safe.

    Every method takes the lock of the holdings itself, and tiers are asked to evict without it.

    Args:
        held: what there is.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._quotas = held.quotas
        self._tiers: Tiers | None = None

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers to evict from."""
        self._tiers = tiers

    def allow(
        self, namespace: bytes, size: int, make: Callable[[int, bytes], bool] | None = None
    ) -> bool:
        """Whether a tenant may have so much more in the CPU tier; its own oldest objects go first.

        Args:
            namespace: one of the tenant's.
            size: bytes.
            make: in place of `make`.
        """
        tenant = self._quotas.owner(namespace)
        over = self._quotas.over(tenant, "cpu", size)
        while over and (make or self.make)(over, tenant):
            over = self._quotas.over(tenant, "cpu", size)
        if over:
            self._quotas.refused(tenant)
        return not over

    def make(self, size: int, tenant: bytes | None = None) -> bool:
        """Evicts about `size` bytes; False when nothing could be evicted, or all would not do.

        What is pinned or on its way to Redis stays.

        Args:
            size: wanted, bytes.
            tenant: whose objects go, because of its limits; None = anybody's.
        """
        tiers, held = self._tiers, self._held
        if tiers is None or size > tiers.pool_bytes:
            return False
        freed, stuck = 0, set[Record]()
        while freed < size:
            with held.lock:
                victims = held.order.victims(
                    size - freed, tenant, lambda r: r in stuck or held.claims.is_pending(r.name)
                )
            if not victims:
                break
            freed += tiers.evict([r.name for r in victims])
            stuck.update(self._note_evicted(victims, tiers))
        with held.lock:
            held.counts["evicted_bytes"] += freed
        if tenant is not None:
            self._quotas.evicted(tenant, freed)
        return freed > 0

    def is_limited(self, namespace: bytes) -> bool:
        """Whether the tenant of a namespace has a limit in the CPU tier."""
        return self._quotas.limits(self._quotas.owner(namespace)).of("cpu") is not None

    def limit(self, tenant: bytes, limits: Limits, stored: Iterable[Record]) -> None:
        """Sets a tenant's limits; what is over stays until somebody makes room.

        Args:
            tenant: whose.
            limits: what holds from now on.
            stored: all of the tenant's objects that exist.
        """
        with self._held.lock:
            self._held.order.limit(tenant, limits, [r for r in stored if r.is_listed])

    def idle_s(self, record: Record) -> float:
        """Seconds since an object's last use; 0 where the CPU tier does not have it."""
        with self._held.lock:
            return self._held.order.idle_s(record)

    def latest_first(self, records: Sequence[Record]) -> list[Record]:
        """Objects in the order of their last use; those that are in Redis alone come last."""
        idle_s: list[float] = []
        for some in batches(records, _RANKED):
            with self._held.lock:
                idle_s += map(self._held.order.idle_s, some)
        ranks = sorted(
            range(len(records)), key=lambda i: idle_s[i] if records[i].in_cpu else math.inf
        )
        return [records[i] for i in ranks]

    def keep(self, records: Iterable[Record]) -> None:
        """Takes objects out of eviction, once more for each time."""
        with self._held.lock:
            self._held.order.keep(records)

    def release(self, records: Iterable[Record]) -> None:
        """Undoes one `keep` of each; they count as used now."""
        with self._held.lock:
            self._held.order.release(records)

    def is_kept(self, record: Record) -> bool:
        """Whether it is out of eviction."""
        with self._held.lock:
            return self._held.order.is_kept(record)

    def _note_evicted(self, victims: Sequence[Record], tiers: Tiers) -> list[Record]:
        """Notes which of the victims are gone, and returns the others."""
        held = self._held
        with held.lock:
            # Asked under the lock, or `loaded` could come between the answer and its noting.
            resident = tiers.resident([r.name for r in victims])
            for record, here in zip(victims, resident, strict=True):
                if not here:
                    held.place(record, in_cpu=False)
                    held.order.forget(record)
                    held.index.trees.prune(record)
        return [record for record, here in zip(victims, resident, strict=True) if here]
