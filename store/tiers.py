"""The CPU and Redis tiers, as one place for objects: the only wrapper round LMCache's manager.

LMCache's own eviction is off. `reserve` says FULL, and the caller, who has the one evictor, makes
room.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.behind import Behind
from tailreplay.store.bulk_tier import BulkTierConfig
from tailreplay.store.doomed import Doomed
from tailreplay.store.lmcache_l1 import (
    construct_manager,
    layout_of,
    object_key,
    object_name,
    overwrite_free,
    tell_released,
)
from tailreplay.store.loader import Loaded, Loader
from tailreplay.store.misses import Miss
from tailreplay.store.objects import ObjectName
from tailreplay.store.outcome_listener import OutcomeListener
from tailreplay.store.pins import Pinned, Pins
from tailreplay.store.pool import Pool
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.reserved import NoRoom, Reserved, room_for
from tailreplay.store.urgent_gate import UrgentGate
from tailreplay.store.write_back import WriteBack

_WRITE_TAG = "tailreplay"
_GOING = (L1Error.KEY_IS_LOCKED, None)
"""As the pool says it of a key that somebody reads or writes."""


class Tiers:
    """Objects in CPU memory and, when configured, in Redis. Thread-safe; nothing here is async.

    Args:
        pool: memory of the CPU tier, from now on this object's to close.
        redis: how objects are kept in Redis; None for no Redis.
        on_redis_stored: called on a background thread once objects are in Redis.
        on_redis_failed: called there for objects that will not get to Redis.
        bulk: further places for objects, of no use without Redis, which says what they have.
        gate: what is urgent passes first; urgent loads from Redis hold it by themselves.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        redis: TailReplayRedisL2Config | None,
        on_redis_stored: Callable[[Sequence[ObjectName]], None],
        on_redis_failed: Callable[[Sequence[ObjectName]], None],
        bulk: Sequence[BulkTierConfig] = (),
        gate: UrgentGate | None = None,
    ) -> None:
        self.gate = gate or UrgentGate()
        adapters = [] if redis is None else [replace(redis, gate=self.gate), *bulk]
        with contextlib.ExitStack() as undo:
            undo.callback(pool.close)
            undo.callback(pool.l1.close)
            self._manager = construct_manager(pool.l1, adapters)
            undo.pop_all()
        self._pool, self._l1 = pool, pool.l1
        # State, under _lock: whether this is over.
        self._lock = threading.Lock()
        self._closed = False
        self._behind = Behind(self._manager)
        self._doomed = Doomed(
            self._l1,
            is_coming=lambda key: self._loader.is_coming(key),
            on_gone=lambda keys: self._write_back.failed(keys),
        )
        self._pins = Pins(pool.l1, self._doomed)
        self._loader = Loader(
            self._l1,
            self._manager,
            pool.size_bytes,
            cancel=self._behind.cancel,
            on_late=self._doomed.purge,
        )
        self._write_back = WriteBack[ObjectKey](
            on_stored=lambda keys: on_redis_stored([object_name(key) for key in keys]),
            on_failed=lambda keys: on_redis_failed([object_name(key) for key in keys]),
            unwanted=self._doomed.among,
            forget=self._behind.delete,
            places=len(self._behind),
        )
        self._manager.register_l2_listener(OutcomeListener(self._write_back, self._loader))

    @property
    def shm_path(self) -> str:
        """File of the pool's segment, for engines that map it; empty when the pool is private."""
        return self._pool.shm_path

    @property
    def pool_bytes(self) -> int:
        """Size of the CPU pool."""
        return self._pool.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool in use, alignment and unfinished writes included."""
        used: int = self._l1.get_memory_usage()[0]
        return used

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that pins keep from eviction; an object counts once."""
        return self._pins.bytes

    @property
    def has_bulk(self) -> bool:
        """Whether there are places for objects beside Redis."""
        return len(self._behind) > 1

    def reserve(self, names: Sequence[ObjectName], size: int) -> list[Reserved | NoRoom]:
        """Take room for objects that are to be stored; each ends with `commit` or `abandon`.

        Args:
            names: what to call them; no two are the same.
            size: bytes of each, at least 1.

        Returns:
            One entry per object, in order: its room, or why there is none. All that are not there
            yet get room, or none of them.
        """
        keys = [object_key(name) for name in names]
        self._doomed.purge()
        going = set(self._doomed.among(keys))  # what were stored now would go with what is deleted
        free = [key for key in keys if key not in going]
        found = self._l1.reserve_write(free, [False] * len(free), layout_of(size), tag=_WRITE_TAG)
        return [room_for(key, size, *found.get(key, _GOING)) for key in keys]

    def commit(self, places: Sequence[Reserved]) -> None:
        """Make objects visible whose bytes are all there; with Redis they then go there, too."""
        if self._behind:
            for place in places:
                self._write_back.begin(place.key, place.size)
        self._l1.finish_write([place.key for place in places], tag=_WRITE_TAG)
        for place in places:
            self._note_overtaken(place.key, place.memory)

    def abandon(self, places: Sequence[Reserved]) -> None:
        """Give room back, of which nobody has seen anything."""
        self._l1.finish_write_and_delete([place.key for place in places], tag=_WRITE_TAG)

    def pin(
        self,
        names_and_sizes: Sequence[tuple[ObjectName, int]],
        *,
        urgent: bool,
        timeout_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> list[Pinned | Miss]:
        """Bring objects into the CPU tier and hold them there until `unpin`.

        What does not fit in the free part of the pool stays out; the others come all the same.

        Args:
            names_and_sizes: objects, and the bytes that each must have.
            urgent: ask Redis for everything at once, not slice by slice.
            timeout_s: how long to wait for Redis.
            is_gone: whether nobody wants them any more; then the rest is late.

        Returns:
            One entry per object, in order: the pin, or why there is none.
        """
        keys = [object_key(name) for name, _ in names_and_sizes]
        found = {key: memory for key, (_, memory) in self._l1.reserve_read(keys).items()}
        loaded = Loaded({}, {})
        missing = {
            key: size
            for (_, size), key in zip(names_and_sizes, keys, strict=True)
            if found[key] is None
        }
        if missing and self._behind:
            deadline = time.monotonic() + timeout_s
            loaded = self._loader.load(missing, urgent=urgent, deadline=deadline, is_gone=is_gone)
            came = self._l1.reserve_read([key for key in keys if key in loaded.came])
            found.update((key, memory) for key, (_, memory) in came.items())
            self._l1.finish_read(list(loaded.came))
        held = [
            loaded.missed.get(key, Miss.ABSENT)
            if (memory := found[key]) is None
            else self._pins.hold(name, size, key, loaded.came.get(key, "cpu"), memory)
            for (name, size), key in zip(names_and_sizes, keys, strict=True)
        ]
        self._pins.add(one for one in held if isinstance(one, Pinned))
        return held

    def unpin(self, pinned: Pinned | Iterable[Pinned | Miss]) -> None:
        """Let go of one or many objects; their `data` is gone. Doing it again changes nothing."""
        batch = (
            [pinned] if isinstance(pinned, Pinned) else [p for p in pinned if isinstance(p, Pinned)]
        )
        if released := self._pins.remove(batch):
            self._l1.finish_read(released)
            self._doomed.purge()

    def resident(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each object whether it is in the CPU tier."""
        keys = [object_key(name) for name in names]
        return [
            key not in self._doomed and self._l1.get_object_state(key) is not None for key in keys
        ]

    def evict(self, names: Sequence[ObjectName]) -> int:
        """Drop objects from the CPU tier, except those pinned or on their way to Redis.

        Returns:
            Bytes of the pool that became free.
        """
        self._doomed.purge()
        sizes = {}
        for key in map(object_key, names):
            if (state := self._l1.get_object_state(key)) is not None:
                sizes[key] = state.memory_obj.get_physical_size()
        outcomes = self._l1.delete(list(sizes))
        dropped = [key for key, error in outcomes.items() if error is L1Error.SUCCESS]
        self._write_back.failed(dropped)
        return sum(sizes[key] for key in dropped)

    def give_up(self, names: Sequence[ObjectName]) -> list[ObjectName]:
        """Have objects stay out of Redis whose way there has not begun; nobody is told of them.

        Returns:
            Those that may be evicted soon: these, what LMCache writes in one go with them, and
            those of `names` that have had their outcome.
        """
        keys, gone = [object_key(name) for name in names], list[ObjectKey]()
        self._behind.give_up(keys, lambda some: gone.extend(self._write_back.withdraw(some)))
        over = [key for key in keys if not self._write_back.is_pending(key)]
        return [object_name(key) for key in dict.fromkeys([*gone, *over])]

    def tell_released(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when objects may be evicted that were read, or written to Redis.

        It is called under a lock of the pool, and must neither wait nor ask anything of it.
        """
        if self._behind:
            tell_released(self._l1, tell)

    def delete(
        self, names: Sequence[ObjectName], *, overwrite: bool = False, in_redis: bool = True
    ) -> tuple[int, list[ObjectName]]:
        """Drop objects from the CPU tier, and from what is behind it.

        One that is pinned disappears for everybody else at once, and for good with its last pin.
        While Redis is away its copies stay there until they expire.

        Args:
            names: which.
            overwrite: write zeros over them in the pool, where somebody reads one once nobody does.
            in_redis: whether Redis is to drop them; otherwise its owner does.

        Returns:
            Bytes overwritten by now, and what is to be overwritten yet.
        """
        keys = [object_key(name) for name in names]
        self._doomed.add(keys)
        size, later = self._doomed.overwrite(keys) if overwrite else (0, ())
        self._doomed.purge()
        self._behind.delete(keys, in_redis=in_redis)
        return size, [object_name(key) for key in later]

    def delete_unknown(
        self, namespaces: Collection[bytes], names: Collection[bytes] | None
    ) -> list[tuple[int, int] | None]:
        """Delete what bulk places have, known to an index or not.

        Args:
            namespaces: whose.
            names: of prefixes, if only those are to go.

        Returns:
            For each place how many objects have gone and how many are left; None where it can not
            be listed, so that only what an index knew is gone.
        """
        return self._behind.delete_unknown(namespaces, names)

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Note tenants by namespace in bulk places, whose files outlive what Redis knows."""
        self._behind.own(owners)

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """Namespaces of a tenant as far as bulk places have noted it."""
        return self._behind.namespaces_of(tenant)

    def overwrite_free(self) -> None:
        """Write zeros over room of the pool that is free, where objects were before."""
        overwrite_free(self._l1)

    def drop(self, names: Sequence[ObjectName]) -> None:
        """As `delete`, from the CPU tier alone.

        While others still read one it can not be loaded again, and is late.
        """
        self._doomed.add(map(object_key, names), Miss.LATE)
        self._doomed.purge()

    def delete_in_redis(self, names: Sequence[ObjectName]) -> None:
        """Drop objects from Redis alone."""
        self._behind.delete([object_key(name) for name in names])

    def held(self, names: Sequence[ObjectName]) -> list[ObjectName]:
        """Tell which deleted objects somebody still reads, or writes to Redis."""
        self._doomed.purge()
        return [name for name in names if object_key(name) in self._doomed]

    def wait_until_gone(self, names: Sequence[ObjectName], timeout_s: float) -> bool:
        """Wait until nobody reads deleted objects any more; False when that takes too long."""
        self._doomed.purge()
        return self._doomed.wait([object_key(name) for name in names], timeout_s)

    def renew(self, names: Sequence[ObjectName]) -> list[bool | None]:
        """Give objects in Redis a new life.

        Returns:
            For each whether it is there; None when that can not be said now.
        """
        return self._behind.renew([object_key(name) for name in names])

    def exist(self, names: Sequence[ObjectName]) -> list[bool | None]:
        """Say for each object whether Redis itself has it; None when that can not be said now."""
        return self._behind.exist([object_key(name) for name in names])

    def write_again(self, names_and_sizes: Sequence[tuple[ObjectName, int]]) -> list[bool]:
        """Write objects in the CPU tier to Redis once more, last of all, and wait until it is done.

        Each has its outcome as of `commit`; those that are not in the CPU tier have failed.

        Returns:
            One entry per object, in order: whether Redis has taken it.
        """
        keys = [object_key(name) for name, _ in names_and_sizes]
        found = {key: memory for key, (_, memory) in self._l1.reserve_read(keys).items()}
        held = [
            None
            if (memory := found[key]) is None
            else self._pins.hold(name, size, key, "cpu", memory)
            for (name, size), key in zip(names_and_sizes, keys, strict=True)
        ]
        pins = [one for one in held if isinstance(one, Pinned)]
        self._pins.add(pins)
        for key, (_, size) in zip(keys, names_and_sizes, strict=True):
            self._write_back.begin(key, size)
        try:
            taken = self._behind.write([pin.key for pin in pins], [pin.data for pin in pins])
            stored = [pin.key for pin, is_taken in zip(pins, taken, strict=True) if is_taken]
            self._write_back.stored(stored)
        finally:
            self._write_back.failed(keys)
            self.unpin(pins)
        written = set(stored)
        return [key in written for key in keys]

    def redis_status(self) -> dict[str, Any]:
        """Report how Redis is doing.

        Returns:
            As `Behind.status`; with Redis also `pending_objects` and `pending_bytes` on their way
            there.
        """
        status = self._behind.status()
        if not self._behind:
            return status
        pending_objects, pending_bytes = self._write_back.pending()
        return {**status, "pending_objects": pending_objects, "pending_bytes": pending_bytes}

    def close(self) -> None:
        """Stop, and give the pool's memory back. No `Pinned.data` may be touched afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loader.close()
        self._manager.close()
        self._write_back.close()
        self._pool.close()

    def _note_overtaken(self, key: ObjectKey, memory: MemoryObj) -> None:
        """Settle the write-back of an object that a load from Redis has put here meanwhile."""
        if not self._behind:
            return
        state = self._l1.get_object_state(key)
        if state is not None and state.memory_obj is not memory:
            self._write_back.stored([key])
