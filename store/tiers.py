"""The CPU and Redis tiers, as one place for objects: the only wrapper round LMCache's manager.

LMCache's own eviction is off. `put` says FULL, and the caller, who has the one evictor, makes room.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchHandle,
    PrefetchLockMode,
    PrefetchResult,
    PrefetchTaskSpec,
)
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

from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.redis_l2 import TailReplayRedisL2Config, WriteBackListener
from tailreplay.store.shm_pool import ALIGN_BYTES, ShmPool
from tailreplay.store.slices import Slice, cut
from tailreplay.store.write_back import WriteBack

# It warns of every failed store with all of its keys; the write-back counts them.
logging.getLogger("lmcache.v1.distributed.storage_controllers.store_controller").setLevel(
    logging.ERROR
)

_BULK_SLICES = 4
"""Loads that one `pin` has in flight when it is not urgent."""
_CLOSE_CHECK_S = 0.2

Source = Literal["cpu", "redis"]

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
    source: Source
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
        redis_options: further fields of `TailReplayRedisL2Config.from_dict`.

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
        redis_options: Mapping[str, object] | None = None,
    ) -> None:
        redis = []
        if redis_url is not None:
            options = {"url": redis_url, **(redis_options or {})}
            redis.append(TailReplayRedisL2Config.from_dict(options))
        with contextlib.ExitStack() as undo:
            self._shm = ShmPool(identity)
            undo.callback(self._shm.close)
            self._l1, self._pool_bytes = self._shm.build(pool_bytes, self._construct_l1)
            undo.callback(self._l1.close)
            _touch(self._l1)
            self._manager = _construct_manager(self._l1, redis)
            undo.pop_all()
        # State, under _lock: pins per object, the bytes they hold, and deleted objects that
        # somebody still reads.
        self._lock = threading.Lock()
        self._pins: dict[ObjectKey, int] = {}
        self._pinned_bytes = 0
        self._doomed: set[ObjectKey] = set()
        self._closing = threading.Event()
        self._late = ThreadPoolExecutor(1, "tailreplay-late")
        self._redis = self._manager.l2_adapters()[0][1] if redis else None
        self._write_back = WriteBack[ObjectKey](
            on_stored=lambda keys: on_redis_stored([_name(key) for key in keys]),
            on_failed=lambda keys: on_redis_failed([_name(key) for key in keys]),
            unwanted=self._unwanted,
            forget=self._forget,
        )
        self._manager.register_l2_listener(_Listener(self._write_back))

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
        self._purge()
        error, memory = self._l1.reserve_write([key], [False], _layout(size), tag=_WRITE_TAG)[key]
        if memory is None:
            return PutOutcome.FULL if error is L1Error.OUT_OF_MEMORY else PutOutcome.EXISTS
        try:
            fill(_bytes_of(memory))
        except BaseException:
            self._l1.finish_write_and_delete([key], tag=_WRITE_TAG)
            raise
        if self._redis is not None:
            self._write_back.begin(key, size)
        self._l1.finish_write([key], tag=_WRITE_TAG)
        self._note_overtaken(key, memory)
        return PutOutcome.STORED

    def pin(
        self,
        names_and_sizes: Sequence[tuple[ObjectName, int]],
        *,
        urgent: bool,
        timeout_s: float,
    ) -> list[Pinned | None]:
        """Bring objects into the CPU tier and hold them there until `unpin`.

        What does not fit in the free part of the pool stays out; the others come all the same.

        Args:
            names_and_sizes: objects, and the bytes that each must have.
            urgent: ask Redis for everything at once, not slice by slice.
            timeout_s: how long to wait for Redis.

        Returns:
            One entry per object, in order; None for what is absent, has another size, does not fit
            in the pool, or did not come in time.
        """
        keys = [_key(name) for name, _ in names_and_sizes]
        found = {key: memory for key, (_, memory) in self._l1.reserve_read(keys).items()}
        loaded: dict[ObjectKey, Source] = {}
        missing = {
            key: size
            for (_, size), key in zip(names_and_sizes, keys, strict=True)
            if found[key] is None
        }
        if missing and self._redis is not None:
            loaded = self._load(missing, urgent=urgent, deadline=time.monotonic() + timeout_s)
            came = self._l1.reserve_read([key for key in keys if key in loaded])
            found.update((key, memory) for key, (_, memory) in came.items())
            self._l1.finish_read(list(loaded))
        return [
            self._hold(name, size, key, loaded.get(key, "cpu"), found[key])
            for (name, size), key in zip(names_and_sizes, keys, strict=True)
        ]

    def unpin(self, pinned: Pinned | Iterable[Pinned | None]) -> None:
        """Let go of one or many objects; their `data` is gone. Doing it again changes nothing."""
        batch = [pinned] if isinstance(pinned, Pinned) else [p for p in pinned if p is not None]
        with self._lock:
            released = [p._key for p in batch if self._release(p)]
        if released:
            self._l1.finish_read(released)
            self._purge()

    def resident(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each object whether it is in the CPU tier."""
        keys = [_key(name) for name in names]
        return [
            key not in self._doomed and self._l1.get_object_state(key) is not None for key in keys
        ]

    def evict(self, names: Sequence[ObjectName]) -> int:
        """Drop objects from the CPU tier, except those pinned or on their way to Redis.

        Returns:
            Bytes of the pool that became free.
        """
        self._purge()
        sizes = {}
        for key in map(_key, names):
            if (state := self._l1.get_object_state(key)) is not None:
                sizes[key] = state.memory_obj.get_physical_size()
        outcomes = self._l1.delete(list(sizes))
        dropped = [key for key, error in outcomes.items() if error is L1Error.SUCCESS]
        self._write_back.failed(dropped)
        return sum(sizes[key] for key in dropped)

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Drop objects from the CPU tier and from Redis.

        One that is pinned disappears for everybody else at once, and for good with its last pin.
        While Redis is away its copies stay there until they expire.
        """
        keys = [_key(name) for name in names]
        with self._lock:
            self._doomed.update(keys)
        self._purge()
        self._forget(keys)

    def redis_status(self) -> dict[str, Any]:
        """Report how Redis is doing.

        Returns:
            `configured`; with Redis also `healthy` (the last contact worked), `pending_objects` and
            `pending_bytes` on their way there, the counters of `ShardCounters`, and `shards`.
        """
        if self._redis is None:
            return {"configured": False, "healthy": False}
        status = self._redis.report_status()
        pending_objects, pending_bytes = self._write_back.pending()
        return {
            **status,
            "configured": True,
            "healthy": status["is_healthy"],
            "pending_objects": pending_objects,
            "pending_bytes": pending_bytes,
        }

    def close(self) -> None:
        """Stop, and give the pool's memory back. No `Pinned.data` may be touched afterwards.

        Takes about 2 s, which LMCache's threads sleep.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._late.shutdown()
        self._manager.close()
        self._write_back.close()
        self._shm.close()

    def _load(
        self, sizes: dict[ObjectKey, int], *, urgent: bool, deadline: float
    ) -> dict[ObjectKey, Source]:
        """Bring objects from Redis into the pool.

        Returns:
            What came, each with one read lock.
        """
        waiting = deque(cut(sizes, lambda key: int(key.object_group_id)))
        in_flight: deque[_Load] = deque()
        loaded: dict[ObjectKey, Source] = {}
        most = len(sizes) if urgent else _BULK_SLICES
        while waiting or in_flight:
            while waiting and len(in_flight) < most:
                taken = self.used_bytes + sum(load.part.pool_bytes for load in in_flight)
                fits = (self._pool_bytes - taken) // waiting[0].stride_bytes
                if fits < len(waiting[0].keys) and (in_flight or not fits):
                    break
                part, rest = waiting.popleft().split(fits)
                waiting.extendleft(rest)
                in_flight.append(_Load(part, self._submit(part)))
            if not in_flight:
                waiting.popleft()  # it doesn't fit; another size may
                continue
            result = self._wait(in_flight[0].handle, deadline)
            if result is None:
                break
            part = in_flight.popleft().part
            came = _outcome(part, result)
            loaded.update(came)
            if not came and len(part.keys) > 1 and _was_found(result):
                # Found and not loaded: there is no room for all of them, but perhaps for some.
                first, rest = part.split(len(part.keys) // 2)
                waiting.extendleft([*rest, first])
        if in_flight:
            with contextlib.suppress(RuntimeError):  # closing, when all locks go anyway
                self._late.submit(self._collect_late, list(in_flight))
        return loaded

    def _submit(self, part: Slice[ObjectKey]) -> PrefetchHandle:
        group = GroupedObjectKeys(part.keys, part.keys[0].object_group_id, _layout(part.size))
        return self._manager.submit_prefetch_task(
            PrefetchTaskSpec([group], fetching_policy="full", lock_mode=PrefetchLockMode.LOCK)
        )

    def _wait(self, handle: PrefetchHandle, deadline: float) -> PrefetchResult | None:
        while not self._closing.is_set():
            left_s = deadline - time.monotonic()
            if self._manager.wait_prefetch_status(handle, max(0.0, min(left_s, _CLOSE_CHECK_S))):
                return self._manager.query_prefetch_status(handle)
            if left_s <= 0:
                return None
        return None

    def _collect_late(self, loads: Sequence[_Load]) -> None:
        """Wait for loads that nobody waits for any more, and undo their locks."""
        for load in loads:
            result = self._wait(load.handle, math.inf)
            if result is not None and (came := _outcome(load.part, result)):
                self._l1.finish_read(list(came))

    def _note_overtaken(self, key: ObjectKey, memory: MemoryObj) -> None:
        """Settle the write-back of an object that a load from Redis has put here meanwhile."""
        if self._redis is None:
            return
        state = self._l1.get_object_state(key)
        if state is not None and state.memory_obj is not memory:
            self._write_back.stored([key])

    def _unwanted(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return those of the keys that were deleted while they were being written to Redis.

        A key in a store task is locked in the pool, and so it is still in _doomed.
        """
        with self._lock:
            return [key for key in keys if key in self._doomed]

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        if self._redis is not None:
            self._redis.delete(list(keys))

    def _purge(self) -> None:
        """Drop deleted objects that nobody reads any more."""
        if not self._doomed:
            return
        with self._lock:
            doomed = list(self._doomed)
        outcomes = self._l1.delete(doomed)
        gone = [key for key in doomed if outcomes[key] is not L1Error.KEY_IS_LOCKED]
        self._write_back.failed(gone)
        with self._lock:
            self._doomed.difference_update(gone)

    def _hold(
        self,
        name: ObjectName,
        size: int,
        key: ObjectKey,
        source: Source,
        memory: MemoryObj | None,
    ) -> Pinned | None:
        """Make a pin of a read lock on `memory`, or let go of it when it is not what is wanted."""
        if memory is None:
            return None
        pool_bytes: int = memory.get_physical_size()
        with self._lock:
            wanted = memory.get_size() == size and key not in self._doomed
            if wanted:
                self._pinned_bytes += 0 if key in self._pins else pool_bytes
                self._pins[key] = self._pins.get(key, 0) + 1
        if not wanted:
            self._l1.finish_read([key])
            return None
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


class _Listener(WriteBackListener):
    """Passes outcomes on, from a thread of the Redis shard; the rest is of no interest."""

    def __init__(self, write_back: WriteBack[ObjectKey]) -> None:
        self._write_back = write_back

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._write_back.stored(keys)

    def on_l2_keys_failed(self, keys: list[ObjectKey]) -> None:
        self._write_back.failed(keys)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None: ...

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None: ...


class _Load(NamedTuple):
    """A slice under way."""

    part: Slice[ObjectKey]
    handle: PrefetchHandle


def _outcome(part: Slice[ObjectKey], result: PrefetchResult) -> dict[ObjectKey, Source]:
    """Return what a load brought, or found already brought by another; each is read-locked."""
    if not result.hit_cells:
        return {}
    hits, from_redis = result.hit_cells[0], result.l2_hit_cells[0]
    return {
        key: "redis" if from_redis.test(i) else "cpu"
        for i, key in enumerate(part.keys)
        if hits.test(i)
    }


def _was_found(result: PrefetchResult) -> bool:
    return bool(result.found_cells and result.found_cells[0].popcount())


def _construct_manager(l1: L1Manager, redis: list[TailReplayRedisL2Config]) -> StorageManager:
    config = StorageManagerConfig(
        l1_manager_config=l1.config,
        eviction_config=EvictionConfig("noop"),
        l2_adapter_config=L2AdaptersConfig(redis),
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


def _name(key: ObjectKey) -> ObjectName:
    namespace = bytes.fromhex(key.model_name.partition("|")[0])
    return ObjectName(namespace, Kind(key.object_group_id), key.chunk_hash)


def _layout(size: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([size])], [torch.uint8])


def _bytes_of(memory: MemoryObj) -> memoryview:
    """Return a writable view of an object's bytes in the pool."""
    return memoryview(memory.byte_array).cast("B")
