"""Deleted objects that somebody still reads, or writes to Redis: gone for all others at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager

from tailreplay.store.lmcache_l1 import bytes_of
from tailreplay.store.misses import Miss


class Doomed:
    """Keys whose memory goes with the last lock on it. Thread-safe.

    Args:
        l1: the pool.
        is_coming: whether a key may come yet, from Redis: till then it is not gone.
        on_gone: told of those that are gone.
    """

    def __init__(
        self,
        l1: L1Manager,
        is_coming: Callable[[ObjectKey], bool],
        on_gone: Callable[[Sequence[ObjectKey]], None],
    ) -> None:
        self._l1 = l1
        self._is_coming = is_coming
        self._on_gone = on_gone
        # State, under _lock: the keys, what others are told of each, and which are to be
        # overwritten yet.
        self._lock = threading.Condition(threading.Lock())
        self._keys: dict[ObjectKey, Miss] = {}
        self._to_overwrite: set[ObjectKey] = set()

    def __contains__(self, key: ObjectKey) -> bool:
        with self._lock:
            return key in self._keys

    def add(self, keys: Iterable[ObjectKey], miss: Miss = Miss.ABSENT) -> None:
        """Deletes objects, for whoever asks from now on: that is told `miss`."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys, miss))

    def why(self, key: ObjectKey) -> Miss | None:
        """What is told of an object that is deleted; None of another."""
        with self._lock:
            return self._keys.get(key)

    def among(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return those of the keys that are deleted.

        A key in a store task is locked in the pool, and so it is still here.
        """
        if not self._keys:
            return []
        with self._lock:
            return [key for key in keys if key in self._keys]

    def purge(self) -> None:
        """Drop what nobody reads any more."""
        if not self._keys:
            return
        with self._lock:
            doomed, unwritten = list(self._keys), list(self._to_overwrite)
        # Asked first: one that is there by now is deleted.
        coming = set(filter(self._is_coming, doomed))
        kept = self._overwrite(unwritten)[1] if unwritten else set[ObjectKey]()
        outcomes = self._l1.delete([key for key in doomed if key not in kept])
        gone = [
            key
            for key, error in outcomes.items()
            if key not in coming and error is not L1Error.KEY_IS_LOCKED
        ]
        self._on_gone(gone)
        with self._lock:
            for key in gone:
                self._keys.pop(key, None)
            self._to_overwrite.difference_update(gone)
            self._lock.notify_all()

    def wait(self, keys: Collection[ObjectKey], timeout_s: float) -> bool:
        """Waits until `purge` has dropped some keys; False when that takes too long."""
        with self._lock:
            return self._lock.wait_for(lambda: self._keys.keys().isdisjoint(keys), timeout_s)

    def overwrite(self, keys: Sequence[ObjectKey]) -> tuple[int, set[ObjectKey]]:
        """Write zeros over deleted objects; over those that somebody reads, once nobody does.

        Returns:
            Bytes overwritten by now, and what somebody reads.
        """
        with self._lock:
            self._to_overwrite.update(keys)
        return self._overwrite(keys)

    def _overwrite(self, keys: Sequence[ObjectKey]) -> tuple[int, set[ObjectKey]]:
        # Who locks one behind this look finds it deleted, and reads nothing of it.
        states = {key: self._l1.get_object_state(key) for key in keys}
        read = {
            k for k, state in states.items() if state is not None and state.read_lock.is_locked()
        }
        free = [key for key, state in states.items() if state is not None and key not in read]
        locked = self._l1.reserve_read(free) if free else {}
        held = {key: memory for key, (_, memory) in locked.items() if memory is not None}
        for memory in held.values():
            view = bytes_of(memory)
            view[:] = bytes(len(view))
        if held:
            self._l1.finish_read(list(held))
        with self._lock:
            self._to_overwrite.difference_update(held)
        return sum(memory.get_size() for memory in held.values()), read
