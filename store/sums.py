"""How much there is: by tier and kind, by namespace, by tenant.

Kept as things move, since counting would hold lookups up. Nothing here locks: the catalog calls it
under its own lock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tailreplay.store.objects import Kind
from tailreplay.store.shm_pool import ALIGN_BYTES

if TYPE_CHECKING:
    from tailreplay.store.quota import Quotas, TierName
    from tailreplay.store.record import Record


class Sums:
    """Sums over all objects that exist.

    Args:
        quotas: keeps those by tenant.

    Attributes:
        kv_blocks: blocks whose keys and values some tier has.
    """

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self.kv_blocks = 0
        self._pooled: dict[bytes, tuple[int, int]] = {}
        self._objects: Counter[tuple[TierName, Kind]] = Counter()
        self._sizes: Counter[tuple[TierName, Kind]] = Counter()

    def place(
        self, record: Record, *, in_cpu: bool | None = None, in_redis: bool | None = None
    ) -> None:
        """Notes where an object is now, None = as before."""
        existed = record.exists
        if in_cpu is not None and in_cpu is not record.in_cpu:
            record.in_cpu = in_cpu
            self._note_pooled(record, 1 if in_cpu else -1)
            self._note(record, "cpu", here=in_cpu)
        if in_redis is not None and in_redis is not record.in_redis:
            record.in_redis = in_redis
            self._note(record, "redis", here=in_redis)
        if record.name.kind is Kind.KV:
            self.kv_blocks += int(record.exists) - int(existed)

    def by_tier(self) -> dict[tuple[TierName, Kind], tuple[int, int]]:
        """Objects and bytes by tier ('cpu', 'redis') and kind."""
        return {key: (n, self._sizes[key]) for key, n in self._objects.items() if n}

    def pooled(self) -> dict[bytes, tuple[int, int]]:
        """Tokens whose keys and values are in the pool, and bytes of all kinds, by namespace."""
        return dict(self._pooled)

    def _note(self, record: Record, tier: TierName, *, here: bool) -> None:
        """Counts an object that has come to a tier, or has left it."""
        key, step = (tier, record.name.kind), 1 if here else -1
        self._objects[key] += step
        self._sizes[key] += step * record.size
        self._quotas.placed(record, tier, here=here)

    def _note_pooled(self, record: Record, step: int) -> None:
        """Keeps sums by namespace: keys and values in the pool, and all that is taken there."""
        space, pooled = record.name.namespace, -(-record.size // ALIGN_BYTES) * ALIGN_BYTES
        rows = record.rows if record.name.kind is Kind.KV else 0
        tokens, taken = self._pooled.get(space, (0, 0))
        if taken + step * pooled:
            self._pooled[space] = (tokens + step * rows, taken + step * pooled)
        else:
            self._pooled.pop(space, None)
