"""Brings objects from the tiers behind the CPU pool into it, slice by slice."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    ObjectKey,
    PrefetchHandle,
    PrefetchLockMode,
    PrefetchResult,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.storage_manager import StorageManager

from tailreplay.store.lmcache_l1 import layout_of
from tailreplay.store.pins import Source
from tailreplay.store.slices import Slice, cut

_BULK_SLICES = 4
"""Loads that one request has in flight when it is not urgent."""
_CLOSE_CHECK_S = 0.2


class _Load(NamedTuple):
    """A slice under way."""

    part: Slice[ObjectKey]
    handle: PrefetchHandle


class Loader:
    """Loads objects into the pool, with deadlines. Thread-safe.

    Args:
        l1: the pool.
        manager: LMCache's manager of it.
        pool_bytes: size of the pool.
    """

    def __init__(self, l1: L1Manager, manager: StorageManager, pool_bytes: int) -> None:
        self._l1 = l1
        self._manager = manager
        self._pool_bytes = pool_bytes
        self._closing = threading.Event()
        self._late = ThreadPoolExecutor(1, "tailreplay-late")

    def load(
        self, sizes: Mapping[ObjectKey, int], *, urgent: bool, deadline: float
    ) -> dict[ObjectKey, Source]:
        """Bring objects into the pool.

        Args:
            sizes: the objects, and the bytes that each must have.
            urgent: ask for everything at once, not slice by slice.
            deadline: when to give up, on the monotonic clock.

        Returns:
            What came, each with one read lock.
        """
        waiting = deque(cut(sizes, lambda key: int(key.object_group_id)))
        in_flight: deque[_Load] = deque()
        loaded: dict[ObjectKey, Source] = {}
        most = len(sizes) if urgent else _BULK_SLICES
        while waiting or in_flight:
            while waiting and len(in_flight) < most:
                taken = self._used_bytes() + sum(load.part.pool_bytes for load in in_flight)
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

    def close(self) -> None:
        """Give up what is under way. Before the manager is closed."""
        self._closing.set()
        self._late.shutdown()

    def _used_bytes(self) -> int:
        used: int = self._l1.get_memory_usage()[0]
        return used

    def _submit(self, part: Slice[ObjectKey]) -> PrefetchHandle:
        group = GroupedObjectKeys(part.keys, part.keys[0].object_group_id, layout_of(part.size))
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
