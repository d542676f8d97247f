"""The CPU and Redis tiers, as one place for objects: the only wrapper round LMCache's manager.

LMCache's own eviction is off. `put` says FULL, and the caller, who has the one evictor, makes room.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    DRAML1ManagerConfig,
    EvictionConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.objects import ObjectName
from tailreplay.store.shm_pool import ALIGN_BYTES, ShmPool

logger = logging.getLogger(__name__)

_WRITE_TAG = "tailreplay"
_LOCK_TTL_S = 24 * 3600
"""LMCache drops a lock after this long; a lease ends a pin long before."""


class PutOutcome(enum.Enum):
    """What became of a `put`."""

    STORED = enum.auto()
    EXISTS = enum.auto()
    """Already there, or being written by another `put`."""
    FULL = enum.auto()
    """No contiguous room in the pool: evict and try again."""


@dataclass(slots=True, eq=False)
class Pinned:
    """A read lock on one object in the pool.

    Attributes:
        name: the object.
        data: its bytes, read-only, in pool memory: valid until `Tiers.unpin`.
        source: where the bytes were found.
        pool_offset: where `data` starts in the segment at `Tiers.shm_path`.
    """

    name: ObjectName
    data: memoryview = field(repr=False)
    source: Literal["cpu", "redis"]
    pool_offset: int
    _key: ObjectKey = field(repr=False)
    _pool_bytes: int = field(repr=False)
    _held: bool = field(default=True, repr=False)


class Tiers:
    """Objects in CPU memory and, when configured, in Redis. Thread-safe; nothing here is async.

    Args:
        pool_bytes: wanted size of the CPU pool; it becomes smaller where /dev/shm is small.
        identity: what tells this store from others on the machine.
        redis_url: `redis://[user:password@]host:port` or `unix:///path`; None for no Redis.
        on_redis_stored: called on a background thread once objects are in Redis.
        on_redis_failed: called there for objects that will not get to Redis.

    Raises:
        StoreUnavailable: a store with this identity is running.
        LimitExceeded: /dev/shm has no room for a pool.
    """

    def __init__(
        self,
        *,
        pool_bytes: int,
        identity: str,
        redis_url: str | None,
        on_redis_stored: Callable[[Sequence[ObjectName]], None],
        on_redis_failed: Callable[[Sequence[ObjectName]], None],
    ) -> None:
        if redis_url is not None:
            raise NotImplementedError("Redis tier")
        self._shm = ShmPool(identity)
        try:
            self._l1, self._pool_bytes = self._shm.build(pool_bytes, self._construct_l1)
        except BaseException:
            self._shm.close()
            raise
        _touch(self._l1)
        self._manager = _construct_manager(self._l1)
        # State, under _lock: pins per object, the bytes that they hold, and whether we are closed.
        self._lock = threading.Lock()
        self._closed = False
        self._pins: dict[ObjectKey, int] = {}
        self._pinned_bytes = 0

    def _construct_l1(self, size_bytes: int) -> L1Manager:
        memory = L1MemoryManagerConfig(
            size_in_bytes=size_bytes,
            use_lazy=False,
            align_bytes=ALIGN_BYTES,
            shm_name=self._shm.path.name,
        )
        return L1Manager(
            DRAML1ManagerConfig(memory, write_ttl_seconds=_LOCK_TTL_S, read_ttl_seconds=_LOCK_TTL_S)
        )

    @property
    def shm_path(self) -> str:
        """File of the pool's segment, for engines that map it."""
        return str(self._shm.path)

    @property
    def pool_bytes(self) -> int:
        """Size of the CPU pool."""
        return self._pool_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool in use, alignment and unfinished writes included."""
        used: int = self._l1.get_memory_usage()[0]
        return used

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that pins keep from eviction; an object counts once."""
        with self._lock:
            return self._pinned_bytes

    def put(self, name: ObjectName, size: int, fill: Callable[[memoryview], None]) -> PutOutcome:
        """Store an object in the CPU tier; with Redis configured it is then written there too.

        Args:
            name: what to call it.
            size: its bytes, at least 1.
            fill: writes all of them into the given pool memory, which still holds the bytes of an
                earlier object. When it raises, nothing becomes visible and the error passes on.
        """
        key = _key(name)
        error, memory = self._l1.reserve_write([key], [False], _layout(size), tag=_WRITE_TAG)[key]
        if memory is None:
            return PutOutcome.FULL if error is L1Error.OUT_OF_MEMORY else PutOutcome.EXISTS
        try:
            fill(_bytes_of(memory))
        except BaseException:
            self._l1.finish_write_and_delete([key], tag=_WRITE_TAG)
            raise
        self._l1.finish_write([key], tag=_WRITE_TAG)
        return PutOutcome.STORED

    def pin(
        self,
        names_and_sizes: Sequence[tuple[ObjectName, int]],
        *,
        urgent: bool,
        timeout_s: float,
    ) -> list[Pinned | None]:
        """Bring objects into the CPU tier and hold them there until `unpin`.

        Args:
            names_and_sizes: objects, and the bytes that each must have.
            urgent: go before bulk work that waits for Redis.
            timeout_s: how long to wait for Redis.

        Returns:
            One entry per object, in order; None for what is absent, has another size, does not fit
            in the pool, or did not come in time.
        """
        keys = [_key(name) for name, _ in names_and_sizes]
        found = self._l1.reserve_read(keys)  # one lock per occurrence
        return [
            self._hold(name, size, key, "cpu", found[key][1])
            for (name, size), key in zip(names_and_sizes, keys, strict=True)
        ]

    def unpin(self, pinned: Pinned | Iterable[Pinned | None]) -> None:
        """Let go of one or many objects; their `data` is gone. Doing it again changes nothing."""
        batch = [pinned] if isinstance(pinned, Pinned) else [p for p in pinned if p is not None]
        with self._lock:
            released = [p._key for p in batch if self._release(p)]
        if released:
            self._l1.finish_read(released)

    def resident(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each object whether it is in the CPU tier."""
        return [self._l1.get_object_state(_key(name)) is not None for name in names]

    def evict(self, names: Sequence[ObjectName]) -> int:
        """Drop objects from the CPU tier, except those pinned or on their way to Redis.

        Returns:
            Bytes of the pool that became free.
        """
        sizes = {}
        for key in map(_key, names):
            if (state := self._l1.get_object_state(key)) is not None:
                sizes[key] = state.memory_obj.get_physical_size()
        dropped = self._l1.delete(list(sizes))
        return sum(sizes[key] for key, error in dropped.items() if error is L1Error.SUCCESS)

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Drop objects from the CPU tier and from Redis."""
        self._l1.delete([_key(name) for name in names])

    def redis_status(self) -> dict[str, Any]:
        """Report how Redis is doing; `configured` is False when there is none."""
        return {"configured": False}

    def close(self) -> None:
        """Stop, and give the pool's memory back. No `Pinned.data` may be touched afterwards."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._manager.close()
        self._shm.close()

    def _hold(
        self,
        name: ObjectName,
        size: int,
        key: ObjectKey,
        source: Literal["cpu", "redis"],
        memory: MemoryObj | None,
    ) -> Pinned | None:
        """Make a pin of a read lock on `memory`, or let go of it when it is not what is wanted."""
        if memory is None:
            return None
        if memory.get_size() != size:
            self._l1.finish_read([key])
            return None
        pool_bytes: int = memory.get_physical_size()
        with self._lock:
            pins = self._pins.get(key, 0)
            self._pins[key] = pins + 1
            if not pins:
                self._pinned_bytes += pool_bytes
        data = _bytes_of(memory).toreadonly()
        return Pinned(name, data, source, memory.shm_offset, key, pool_bytes)

    def _release(self, pinned: Pinned) -> bool:
        """Take a pin off the books; False when that was done before. Called under _lock."""
        if not pinned._held:
            return False
        pinned._held = False
        self._pins[pinned._key] -= 1
        if not self._pins[pinned._key]:
            del self._pins[pinned._key]
            self._pinned_bytes -= pinned._pool_bytes
        return True


def _construct_manager(l1: L1Manager) -> StorageManager:
    config = StorageManagerConfig(
        l1_manager_config=l1.config,
        eviction_config=EvictionConfig("noop"),
        l2_adapter_config=L2AdaptersConfig([]),
        prefetch_policy="retain",
        prefetch_max_in_flight=128,
    )
    return StorageManager(config, _l1_managers=(l1,))


def _touch(l1: L1Manager) -> None:
    """Map every page of the pool now; the first write to a page is 20 times slower than others."""
    memory = l1.get_l1_memory_desc()
    ctypes.memset(memory.ptr, 0, memory.size)


def _key(name: ObjectName) -> ObjectKey:
    return ObjectKey(
        chunk_hash=name.prefix_hash,
        # The kind is part of it because LMCache takes objects of one model to have one size.
        model_name=f"{name.namespace.hex()}|{name.kind.name.lower()}",
        kv_rank=0,
        object_group_id=int(name.kind),
    )


def _layout(size: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([size])], [torch.uint8])


def _bytes_of(memory: MemoryObj) -> memoryview:
    """Return a writable view of an object's bytes in the pool."""
    return memoryview(memory.byte_array).cast("B")
