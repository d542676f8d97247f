"""What LMCache has asked to be written to Redis, and what of it can still be taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from lmcache.v1.distributed.api import ObjectKey

from tailreplay.store.redis_jobs import Store
from tailreplay.store.redis_shard import RedisShard


@dataclass(frozen=True, slots=True)
class Write:
    """One object of a task, and who writes it."""

    key: ObjectKey
    shard: RedisShard
    store: Store


class RedisWrites:
    """Store tasks that are not over. Thread-safe.

    LMCache lets go of a task's objects all at once, when the last of them has its outcome. So a
    task is taken back as a whole or not at all.
    """

    def __init__(self) -> None:
        # State, under _lock: the objects of each task without an outcome, and each object's task.
        self._lock = threading.Lock()
        self._open: dict[int, dict[int, Write]] = {}
        self._task_of: dict[ObjectKey, int] = {}

    def begin(self, task_id: int, writes: Sequence[Write]) -> None:
        """Note a task, before the first of it is handed to a shard."""
        with self._lock:
            self._open[task_id] = dict(enumerate(writes))
            self._task_of.update((write.key, task_id) for write in writes)

    def done(self, task_id: int, position: int) -> None:
        """Note that one of a task's objects has its outcome."""
        with self._lock:
            left = self._open[task_id]
            write = left.pop(position)
            if self._task_of.get(write.key) == task_id:
                del self._task_of[write.key]
            if not left:
                del self._open[task_id]

    def take_back(self, keys: Iterable[ObjectKey]) -> list[Write]:
        """Take back the tasks of some objects of which nothing is under way.

        The caller tells each `store.done` that it failed.
        """
        with self._lock:
            tasks = {self._task_of[key] for key in keys if key in self._task_of}
            rest = [list(self._open[task].values()) for task in sorted(tasks)]
        # All at once: to look through a shard's queue takes as long as that is.
        queued = {
            store for shard, stores in _by_shard(rest).items() for store in shard.queued(stores)
        }
        whole = [writes for writes in rest if all(write.store in queued for write in writes)]
        gone = {
            store for shard, stores in _by_shard(whole).items() for store in shard.take_back(stores)
        }
        return [write for writes in whole for write in writes if write.store in gone]


def _by_shard(tasks: Iterable[Iterable[Write]]) -> dict[RedisShard, set[Store]]:
    by_shard: dict[RedisShard, set[Store]] = {}
    for write in chain.from_iterable(tasks):
        by_shard.setdefault(write.shard, set()).add(write.store)
    return by_shard
