"""What the catalog and its parts hold in common, and the one lock over all of it."""

from __future__ import annotations

import threading
from collections import Counter

from tailreplay.store.claims import Claims
from tailreplay.store.eviction_order import EvictionOrder
from tailreplay.store.geometries import Geometries
from tailreplay.store.index import TokenIndex
from tailreplay.store.quota import Quotas
from tailreplay.store.sums import Sums


class Holdings:
    """Shared by `Catalog`, `Room` and `RedisCatalog`, each of which takes the lock itself.

    No I/O happens while the lock is held. Under it those of `quotas` and of what is in the CPU tier
    may be taken, never the other way round.

    Args:
        to_redis: whether objects go on to Redis.

    Attributes:
        quotas: what each tenant uses, and may; thread-safe by itself.
        lock: guards everything below.
        index: which prefixes are known, and which objects of them exist.
        sums: how much there is of what, and where; `place` notes where an object is.
        order: in which objects leave the CPU tier.
        claims: what is on its way in, and to Redis.
        geometries: shapes of each namespace's objects.
        counts: counters by name.
    """

    def __init__(self, *, to_redis: bool) -> None:
        self.quotas = Quotas()
        self.lock = threading.Lock()
        # Guarded by lock: everything below.
        self.index = TokenIndex()
        self.sums = Sums(self.quotas)
        self.place = self.sums.place
        self.order = EvictionOrder(self.quotas)
        self.claims = Claims(to_redis=to_redis)
        self.geometries = Geometries()
        self.counts: Counter[str] = Counter()

    def busy_spaces(self) -> set[bytes]:
        """Namespaces that have blocks, or get some now; called under the lock."""
        return {*self.index.trees.sizes(), *self.claims.namespaces()}
