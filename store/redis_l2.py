"""Redis as an L2 tier of LMCache: what its controllers ask, spread over one or more servers.

Stock `lmcache server` loads it as well, as docs/lmcache.md says.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import register_l2_adapter_type
from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from tailreplay.store.l2_listener import WriteBackListener
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind
from tailreplay.store.placement import owner
from tailreplay.store.redis_jobs import Load, Outcome, Store
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.redis_object_keys import redis_key
from tailreplay.store.redis_pages import RedisPages
from tailreplay.store.redis_shard import RedisShard, ShardCounters
from tailreplay.store.redis_writes import RedisWrites, Write

ADAPTER_TYPE = "tailreplay_redis"

_URGENT_GROUPS = frozenset({int(Kind.HIDDEN), int(Kind.CHECKPOINT)})
_DELETE_TIMEOUT_S = 5.0
_MISS_OF = {
    Outcome.ABSENT: Miss.ABSENT,
    Outcome.DAMAGED: Miss.DAMAGED,
    Outcome.AWAY: Miss.AWAY,
    Outcome.CANCELLED: Miss.LATE,
}


class _Ask(Protocol):
    """Asks a shard of some keys which are there."""

    def __call__(
        self,
        shard: RedisShard,
        keys: Sequence[bytes],
        /,
        *,
        done: Callable[[Sequence[bool] | None], None],
    ) -> None: ...


class _Task:
    """A batch of keys in flight, done when each of them is."""

    def __init__(self, keys: Sequence[ObjectKey], finish: Callable[[_Task], None]) -> None:
        self.keys = list(keys)
        self.succeeded = [False] * len(keys)
        self._finish = finish
        # State, under _lock: answers still due.
        self._lock = threading.Lock()
        self._due = len(keys)
        if not keys:
            finish(self)

    def answer(self, positions: Sequence[int], succeeded: Sequence[bool]) -> None:
        """Take note of some keys' outcomes."""
        with self._lock:
            for position, success in zip(positions, succeeded, strict=True):
                self.succeeded[position] = success
            self._due -= len(positions)
            due = self._due
        if not due:
            self._finish(self)

    def bitmap(self) -> Bitmap:
        """Return the outcomes in LMCache's form."""
        bitmap = Bitmap(len(self.keys))
        for position, success in enumerate(self.succeeded):
            if success:
                bitmap.set(position)
        return bitmap


class TailReplayRedisL2(L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """Redis behind LMCache's L2 interface. Thread-safe; of LMCache's methods two wait, see there.

    Urgent loads (hiddens and checkpoints, told by `object_group_id`) pass bulk loads, which pass
    stores. Redis does not lock keys: a key that a lookup found may be gone at its load.

    Args:
        config: the configuration, or the dict that LMCache's plugin type passes.
        l1_memory_desc: the pool, which needs no registration here.
    """

    def __init__(
        self,
        config: TailReplayRedisL2Config | Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, TailReplayRedisL2Config):
            config = TailReplayRedisL2Config.from_dict(config)
        self._prefix = config.key_prefix
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        self._task_ids = itertools.count()
        self._writes = RedisWrites()
        # State, under _lock: finished tasks that nobody has asked for yet.
        self._lock = threading.Lock()
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        self._shards = [
            RedisShard(endpoint, config.shard, config.gate, config.envelope)
            for endpoint in config.endpoints
        ]
        self._places = [endpoint.place for endpoint in config.endpoints]
        self._pages = RedisPages(self._shards, config.key_prefix)

    def get_store_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a store task is finished."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a lookup task is finished."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a load task is finished."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Write objects, of any sizes, to Redis."""
        task_id = next(self._task_ids)
        sizes = [memory.get_size() for memory in objects]
        task = _Task(keys, lambda task: self._finish_store(task_id, task, sizes))
        writes = []
        for position, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            payload = memoryview(memory.byte_array).cast("B")
            store = Store(
                redis_key(self._prefix, key), payload, self._written(task_id, task, position)
            )
            writes.append(Write(key, self._shard_of(key), store))
        if writes:
            self._writes.begin(task_id, writes)
        for write in writes:
            write.shard.store(write.store)
        return task_id

    def give_up(
        self, keys: Sequence[ObjectKey], before: Callable[[Sequence[ObjectKey]], None]
    ) -> None:
        """Fail the writes of some objects, and of what goes with them, where none is under way.

        Args:
            keys: which.
            before: told of all those before they fail.
        """
        gone = self._writes.take_back(keys)
        before([write.key for write in gone])
        for write in gone:
            write.store.done(False)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the finished store tasks, each once; one failed object makes its task failed."""
        with self._lock:
            finished, self._stores = self._stores, {}
        return finished

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask which keys Redis has."""
        task_id = next(self._task_ids)
        task = _Task(keys, lambda task: self._finish_lookup(task_id, task))
        for shard, positions in self._by_shard(keys).items():
            shard.lookup(
                [redis_key(self._prefix, keys[position]) for position in positions],
                done=self._found(task, positions),
            )
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return a finished lookup's answer, once; None while it runs."""
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: nothing is locked in Redis."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Read objects, of any sizes, from Redis into the given memory."""
        task_id = next(self._task_ids)
        task = _Task(keys, lambda task: self._finish_load(task_id, task))
        for position, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            into = memoryview(memory.byte_array).cast("B")
            urgent = key.object_group_id in _URGENT_GROUPS
            done = self._loaded(task, position)
            self._shard_of(key).load(Load(redis_key(self._prefix, key), into, urgent, done))
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return a finished load's outcomes, once; None while it runs."""
        with self._lock:
            return self._loads.pop(task_id, None)

    def cancel(self, keys: Sequence[ObjectKey]) -> None:
        """Fail loads of some keys, but for those under way: whoever waited has given up."""
        for shard, positions in self._by_shard(keys).items():
            shard.cancel({redis_key(self._prefix, keys[position]) for position in positions})

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete keys and wait for it; a server that is away keeps its keys until they expire."""
        finished = threading.Event()
        task = _Task(keys, lambda _: finished.set())
        for shard, positions in self._by_shard(keys).items():
            shard.delete(
                [redis_key(self._prefix, keys[position]) for position in positions],
                done=_answer_all(task, positions),
            )
        if finished.wait(_DELETE_TIMEOUT_S):
            deleted = [key for key, ok in zip(keys, task.succeeded, strict=True) if ok]
            self._notify_keys_deleted(deleted, [0] * len(deleted))

    def write(self, keys: Sequence[ObjectKey], payloads: Sequence[memoryview]) -> list[bool]:
        """Write objects behind LMCache's back, and wait for it; says which Redis has taken."""
        finished = threading.Event()
        task = _Task(keys, lambda _: finished.set())
        for position, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
            done = _answer_one(task, position)
            self._shard_of(key).store(Store(redis_key(self._prefix, key), payload, done))
        finished.wait()
        return list(task.succeeded)

    def renew(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        """Give values a new life, and wait for it; says which are there, None = not known."""
        return self._say_which(keys, RedisShard.renew)

    def exist(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        """Say which values are there, None = not known, and wait for it."""
        return self._say_which(keys, RedisShard.lookup)

    def _say_which(self, keys: Sequence[ObjectKey], ask: _Ask) -> list[bool | None]:
        finished = threading.Event()
        there: list[bool | None] = [None] * len(keys)
        task = _Task(keys, lambda _: finished.set())

        def answered(positions: Sequence[int]) -> Callable[[Sequence[bool] | None], None]:
            def done(found: Sequence[bool] | None) -> None:
                for position, is_there in zip(positions, found or (), strict=found is not None):
                    there[position] = is_there
                task.answer(positions, [True] * len(positions))

            return done

        for shard, positions in self._by_shard(keys).items():
            ask(
                shard,
                [redis_key(self._prefix, keys[p]) for p in positions],
                done=answered(positions),
            )
        return list(there) if finished.wait(_DELETE_TIMEOUT_S) else [None] * len(keys)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List what the servers have, as `RedisPages.page`, and wait for it."""
        return self._pages.page(model_name, page_size, cursor)

    def report_status(self) -> dict[str, Any]:
        """Report each server; healthy only while the last contact with every one worked."""
        shards = [shard.status() for shard in self._shards]
        return {
            "is_healthy": all(shard["is_healthy"] for shard in shards),
            "type": ADAPTER_TYPE,
            "shards": shards,
            **{f.name: sum(shard[f.name] for shard in shards) for f in fields(ShardCounters)},
        }

    def close(self) -> None:
        """Stop; tasks under way fail, and no object's memory is touched afterwards."""
        for shard in self._shards:
            shard.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _finish_store(self, task_id: int, task: _Task, sizes: Sequence[int]) -> None:
        outcomes = list(zip(task.keys, sizes, task.succeeded, strict=True))
        stored = [(key, size) for key, size, success in outcomes if success]
        failed = [key for key, _, success in outcomes if not success]
        # Before the task's end, after which the objects may be evicted from L1.
        if stored:
            self._notify_keys_stored([key for key, _ in stored], [size for _, size in stored])
        if failed:
            for listener in self._listeners:
                if isinstance(listener, WriteBackListener):
                    listener.on_l2_keys_failed(failed)
        result = L2StoreResult(not failed, sum(size for _, size in stored))
        with self._lock:
            self._stores[task_id] = result
        self._store_event.notify()

    def _finish_lookup(self, task_id: int, task: _Task) -> None:
        bitmap = task.bitmap()
        with self._lock:
            self._lookups[task_id] = bitmap
        self._lookup_event.notify()

    def _finish_load(self, task_id: int, task: _Task) -> None:
        bitmap = task.bitmap()
        self._notify_keys_accessed(bitmap.gather(task.keys))
        with self._lock:
            self._loads[task_id] = bitmap
        self._load_event.notify()

    def _found(
        self, task: _Task, positions: Sequence[int]
    ) -> Callable[[Sequence[bool] | None], None]:
        def done(found: Sequence[bool] | None) -> None:
            if found is None:
                self._notify_missed([task.keys[p] for p in positions], Miss.AWAY)
            task.answer(positions, found or [False] * len(positions))

        return done

    def _written(self, task_id: int, task: _Task, position: int) -> Callable[[bool], None]:
        def done(success: bool) -> None:
            self._writes.done(task_id, position)
            task.answer([position], [success])

        return done

    def _loaded(self, task: _Task, position: int) -> Callable[[Outcome], None]:
        def done(outcome: Outcome) -> None:
            if outcome in _MISS_OF:
                self._notify_missed([task.keys[position]], _MISS_OF[outcome])
            task.answer([position], [outcome is Outcome.LOADED])

        return done

    def _notify_missed(self, keys: list[ObjectKey], why: Miss) -> None:
        for listener in self._listeners if keys else ():
            if isinstance(listener, WriteBackListener):
                listener.on_l2_keys_missed(keys, why)

    def _by_shard(self, keys: Sequence[ObjectKey]) -> dict[RedisShard, list[int]]:
        """Group the positions of keys by the shard that has them."""
        positions: dict[RedisShard, list[int]] = {}
        for position, key in enumerate(keys):
            positions.setdefault(self._shard_of(key), []).append(position)
        return positions

    def _shard_of(self, key: ObjectKey) -> RedisShard:
        # LMCache's own keys say nothing of a segment: those objects are each placed alone.
        return self._shards[owner(self._places, getattr(key, "placed_by", key.chunk_hash))]


def _answer_one(task: _Task, position: int) -> Callable[[bool], None]:
    return lambda success: task.answer([position], [success])


def _answer_all(task: _Task, positions: Sequence[int]) -> Callable[[bool], None]:
    return lambda success: task.answer(positions, [success] * len(positions))


register_l2_adapter_type(ADAPTER_TYPE, TailReplayRedisL2Config)
register_l2_adapter_factory(ADAPTER_TYPE, TailReplayRedisL2)
