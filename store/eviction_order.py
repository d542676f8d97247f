"""The order in which objects leave the CPU tier, and which never do.

Nothing here locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tailreplay.store.evictor import Evictor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailreplay.store.quota import Limits, Quotas
    from tailreplay.store.record import Record


class EvictionOrder:
    """The evictor, but for what an operator keeps; limited tenants have an order of their own.

    Args:
        quotas: has those orders.
    """

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._evictor = Evictor()
        self._kept: Counter[Record] = Counter()

    def use(self, records: Iterable[Record]) -> None:
        """As `Evictor.use`, but for what is kept."""
        self._evictor.use([record for record in records if record not in self._kept])

    def use_together(self, records: Sequence[Record]) -> None:
        """Marks listed objects of one prefix as used, those in Redis alone among them."""
        self.use([record for record in records if record.in_cpu])
        self._quotas.used(records)

    def demote(self, record: Record) -> None:
        """Makes an object the next to go."""
        self._evictor.demote(record)
        self._quotas.demoted(record)

    def forget(self, record: Record) -> None:
        """Takes an object out, because it has left the CPU tier."""
        self._evictor.forget(record)

    def drop(self, record: Record) -> None:
        """Takes an object out that is no more, whoever keeps it."""
        self._kept.pop(record, None)
        self._evictor.forget(record)

    def keep(self, records: Iterable[Record]) -> None:
        """Takes objects out of eviction, once more for each time."""
        for record in records:
            self._kept[record] += 1
            self._evictor.forget(record)

    def release(self, records: Iterable[Record]) -> None:
        """Undoes one `keep` of each; they count as used now."""
        kept = [record for record in records if record in self._kept]
        self._kept.subtract(kept)
        free = [record for record in kept if not self._kept[record]]
        for record in free:
            del self._kept[record]
        self.use([record for record in free if record.in_cpu])

    def is_kept(self, record: Record) -> bool:
        """Whether it is out of eviction."""
        return record in self._kept

    def victims(
        self, size: int, tenant: bytes | None, spare: Callable[[Record], bool]
    ) -> list[Record]:
        """Objects to evict, of one tenant or of anybody, as `Evictor.victims`."""

        def stays(record: Record) -> bool:
            return record in self._kept or spare(record)

        if tenant is None:
            return self._evictor.victims(size, spare=stays)
        return self._quotas.victims(tenant, "cpu", size, stays)

    def limit(self, tenant: bytes, limits: Limits, listed: Iterable[Record]) -> None:
        """Sets a tenant's limits.

        Args:
            tenant: whose.
            limits: from now on.
            listed: all of its objects.
        """
        spaces = set(self._quotas.namespaces(tenant))
        used = [r for r in self._evictor.order() if r.name.namespace in spaces]
        self._quotas.limit(tenant, limits, dict.fromkeys([*used, *listed]))

    def idle_s(self, record: Record) -> float:
        """Seconds since an object's last use; 0 where the CPU tier does not have it."""
        return self._evictor.idle_s(record)

    def members(self) -> tuple[set[Record], set[Record]]:
        """What could go, and what is kept."""
        return set(self._evictor.order()), set(self._kept)
