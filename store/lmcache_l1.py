"""LMCache's storage manager as this store wants it, and its names and layouts for our objects."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    DRAML1ManagerConfig,
    EvictionConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.placement import digest_of
from tailreplay.store.shm_pool import ALIGN_BYTES

# It warns of every failed store with all of its keys; the write-back counts them.
logging.getLogger("lmcache.v1.distributed.storage_controllers.store_controller").setLevel(
    logging.ERROR
)

_LOCK_TTL_S = 24 * 3600
"""LMCache drops a lock after this long; a lease ends a pin long before."""


_STEP_BYTES = 4 << 20
"""Overwritten at a time, for which others wait that want room: less than a millisecond."""


def construct_l1(size_bytes: int, shm_name: str) -> L1Manager:
    """Make a pool of `size_bytes` in the shared-memory segment of that name, sparse as yet."""
    memory = L1MemoryManagerConfig(
        size_in_bytes=size_bytes, use_lazy=False, align_bytes=ALIGN_BYTES, shm_name=shm_name
    )
    return L1Manager(
        DRAML1ManagerConfig(memory, write_ttl_seconds=_LOCK_TTL_S, read_ttl_seconds=_LOCK_TTL_S)
    )


def construct_manager(l1: L1Manager, adapters: Sequence[L2AdapterConfigBase]) -> StorageManager:
    """Put the pool and the tiers behind it together, with LMCache's own eviction off."""
    config = StorageManagerConfig(
        l1_manager_config=l1.config,
        eviction_config=EvictionConfig("noop"),
        l2_adapter_config=L2AdaptersConfig(list(adapters)),
        prefetch_policy="retain",
        prefetch_max_in_flight=128,
    )
    manager = StorageManager(config, _l1_managers=(l1,))
    for evictor in (*manager._eviction_controllers, manager._l2_eviction_controller):
        # Both sleep a second at a time, and closing would wait for one after the other. Neither has
        # anything to evict, and what they look at when they wake is there after the end, too.
        evictor.stop = evictor._stop_flag.set
    if not adapters:
        # Its threads for eviction and for the tiers behind would be woken at every write, for
        # nothing: the one is off, and there are no others.
        l1._registered_listeners.clear()
    return manager


def touch(l1: L1Manager) -> None:
    """Map every page of the pool now; the first write to a page is 20 times slower than others."""
    memory = l1.get_l1_memory_desc()
    ctypes.memset(memory.ptr, 0, memory.size)


@lru_cache(maxsize=1024)
def _model_name(namespace: bytes, kind: Kind) -> str:
    """Return the model's name in keys: one string, which is then hashed and compared once."""
    # The kind is part of it because LMCache takes objects of one model to have one size.
    return f"{namespace.hex()}|{kind.name.lower()}"


@dataclass(frozen=True)
class PlacedKey(ObjectKey):  # type: ignore[misc]  # untyped base
    """A key that says which Redis server has its object.

    Attributes:
        placed_by: what the server is chosen by; no part of the key.
    """

    placed_by: bytes = field(default=b"", compare=False, repr=False)


def object_key(name: ObjectName) -> PlacedKey:
    """Return LMCache's key for an object."""
    return PlacedKey(
        chunk_hash=name.prefix_hash,
        model_name=_model_name(name.namespace, name.kind),
        kv_rank=0,
        object_group_id=int(name.kind),
        placed_by=digest_of(name.namespace, name.placed_by or name.prefix_hash),
    )


def object_name(key: ObjectKey) -> ObjectName:
    """Return the object that `object_key` made a key for."""
    namespace = bytes.fromhex(key.model_name.partition("|")[0])
    return ObjectName(namespace, Kind(key.object_group_id), key.chunk_hash)


def layout_of(size: int) -> MemoryLayoutDesc:
    """Return the layout of an object of `size` bytes."""
    return MemoryLayoutDesc([torch.Size([size])], [torch.uint8])


def pool_view(l1: L1Manager) -> memoryview:
    """Return a writable view of the whole pool; objects lie at their `meta.address`."""
    pool = l1.get_l1_memory_desc()
    return memoryview((ctypes.c_ubyte * pool.size).from_address(pool.ptr)).cast("B")


def overwrite_free(l1: L1Manager) -> None:
    """Write zeros over what nobody has of the pool, which still holds bytes of what was there.

    A step at a time, between which others get room; what they get behind it is theirs. What becomes
    free before where it has come to is left as it was.
    """
    room = l1._memory_manager._allocator.pin_allocator.address_manager
    start, at = l1.get_l1_memory_desc().ptr, 0
    while True:
        with room._lock:
            free = next((b for b in room._explicit_list if b.start + b.size > at), None)
            if free is None:
                return
            first = max(at, free.start)
            at = min(free.start + free.size, first + _STEP_BYTES)
            ctypes.memset(start + first, 0, at - first)


def bytes_of(memory: MemoryObj) -> memoryview:
    """Return a writable view of an object's bytes in the pool."""
    return memoryview(memory.byte_array).cast("B")


def tell_released(l1: L1Manager, tell: Callable[[], None]) -> None:
    """Have `tell` called, under the pool's lock, whenever readers let go of objects.

    LMCache, which reads them for Redis, is one.
    """
    l1.register_listener(_ReleaseListener(tell))


class _ReleaseListener(L1ManagerListener):  # type: ignore[misc]  # untyped base
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        self._tell()

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None: ...

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None: ...

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None: ...

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None: ...

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None: ...

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None: ...
