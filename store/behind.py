"""What is behind the CPU tier: Redis, and the bulk places beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.storage_manager import StorageManager

from tailreplay.store.redis_l2 import TailReplayRedisL2  # which makes it known to LMCache


class Behind:
    """The adapters of LMCache's manager: Redis first, or none at all. Thread-safe.

    Args:
        manager: has them.
    """

    def __init__(self, manager: StorageManager) -> None:
        self._adapters = [adapter for _, adapter in manager.l2_adapters()]
        self._redis: TailReplayRedisL2 | None = self._adapters[0] if self._adapters else None

    def __len__(self) -> int:
        return len(self._adapters)

    def delete(self, keys: Sequence[ObjectKey], *, in_redis: bool = True) -> None:
        """Drop objects there, or everywhere but in Redis."""
        for adapter in self._adapters:
            if in_redis or adapter is not self._redis:
                adapter.delete(list(keys))

    def delete_unknown(
        self, namespaces: Collection[bytes], names: Collection[bytes] | None
    ) -> list[tuple[int, int] | None]:
        """Drop what bulk places have, known to an index or not; as `BulkTier.delete_unknown`."""
        return [adapter.delete_unknown(namespaces, names) for adapter in self._adapters[1:]]

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Note tenants by namespace where that outlives Redis."""
        for adapter in self._adapters[1:]:
            adapter.own(owners)

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """Tell what was noted there as a tenant's."""
        return set[bytes]().union(*(one.namespaces_of(tenant) for one in self._adapters[1:]))

    def cancel(self, keys: Sequence[ObjectKey]) -> None:
        """Take back loads from Redis that are not under way."""
        if self._redis is not None:
            self._redis.cancel(keys)

    def give_up(
        self, keys: Sequence[ObjectKey], before: Callable[[Sequence[ObjectKey]], None]
    ) -> None:
        """Have objects not written to Redis whose write has not begun, as the adapter does it."""
        if self._redis is not None:
            self._redis.give_up(keys, before)

    def renew(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        """Give objects in Redis a new life.

        Returns:
            For each whether it is there; None when that can not be said now.
        """
        if self._redis is None or not keys:
            return [None] * len(keys)
        renewed: list[bool | None] = self._redis.renew(keys)
        # Elsewhere nothing expires, and what Redis lacks may be there.
        return [found or None for found in renewed] if self._adapters[1:] else renewed

    def exist(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        """Say which objects are in Redis; None where that can not be said now."""
        return [None] * len(keys) if self._redis is None else self._redis.exist(keys)

    def write(self, keys: Sequence[ObjectKey], payloads: Sequence[memoryview]) -> list[bool]:
        """Write objects to Redis, last of all, and wait; says which it has taken."""
        return [False] * len(keys) if self._redis is None else self._redis.write(keys, payloads)

    def status(self) -> dict[str, Any]:
        """Report how Redis is doing.

        Returns:
            `configured`; with Redis also `healthy` (the last contact worked), the counters of
            `ShardCounters`, `shards`, and `bulk` of the places beside it, whose `integrity_errors`
            are counted in.
        """
        if self._redis is None:
            return {"configured": False, "healthy": False}
        status = self._redis.report_status()
        bulk = [adapter.report_status() for adapter in self._adapters[1:]]
        return {
            **status,
            "bulk": bulk,
            "integrity_errors": sum(one["integrity_errors"] for one in (status, *bulk)),
            "configured": True,
            "healthy": status["is_healthy"],
        }
