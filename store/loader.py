"""Brings objects from the tiers behind the CPU pool into it, slice by slice."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
from tailreplay.store.misses import Miss
from tailreplay.store.pins import Source
from tailreplay.store.slices import Slice, cut

_BULK_SLICES = 4
"""Loads that one request has in flight when it is not urgent."""
_CHECK_S = 0.2
"""Between two looks at whether anybody still waits."""


class _Load(NamedTuple):
    """A slice under way."""

    part: Slice[ObjectKey]
    handle: PrefetchHandle


class _Until(NamedTuple):
    """How long to wait: see `Loader.load`."""

    deadline: float
    is_gone: Callable[[], bool]


class Loaded(NamedTuple):
    """What became of a request; each of its objects is in one of the two.

    Attributes:
        came: where from; each has one read lock.
        missed: why not.
    """

    came: dict[ObjectKey, Source]
    missed: dict[ObjectKey, Miss]


class Loader:
    """Loads objects into the pool, with deadlines. Thread-safe.

    Args:
        l1: the pool.
        manager: LMCache's manager of it.
        pool_bytes: size of the pool.
        cancel: takes back loads that are not under way.
        on_late: called after a load has ended that nobody waited for any more.
    """

    def __init__(
        self,
        l1: L1Manager,
        manager: StorageManager,
        pool_bytes: int,
        cancel: Callable[[Sequence[ObjectKey]], None],
        on_late: Callable[[], None],
    ) -> None:
        self._on_late = on_late
        self._l1 = l1
        self._manager = manager
        self._pool_bytes = pool_bytes
        self._cancel = cancel
        # State, under _lock: how many requests wait for an object, which may come although nobody
        # does, and what its tier last said.
        self._lock = threading.Lock()
        self._waiters: Counter[ObjectKey] = Counter()
        self._coming_late: Counter[ObjectKey] = Counter()
        self._said: dict[ObjectKey, Miss] = {}
        self._closing = threading.Event()
        self._late = ThreadPoolExecutor(1, "tailreplay-late")

    def load(
        self,
        sizes: Mapping[ObjectKey, int],
        *,
        urgent: bool,
        deadline: float,
        is_gone: Callable[[], bool],
    ) -> Loaded:
        """Bring objects into the pool.

        Args:
            sizes: the objects, and the bytes that each must have.
            urgent: ask for everything at once, not slice by slice.
            deadline: when to give up, on the monotonic clock.
            is_gone: whether nobody wants it any more; asked every now and then.
        """
        until = _Until(deadline, is_gone)
        with self._lock:
            self._waiters.update(sizes.keys())
        try:
            return self._load(sizes, urgent, until)
        finally:
            self._leave(sizes)

    def is_coming(self, key: ObjectKey) -> bool:
        """Whether an object may still come, whether or not somebody waits for it."""
        with self._lock:
            return key in self._waiters or key in self._coming_late

    def missed(self, keys: Iterable[ObjectKey], why: Miss) -> None:
        """Take note of why objects will not come, before their load or lookup ends."""
        with self._lock:
            for key in keys:
                if key in self._waiters:
                    self._said[key] = why

    def _load(self, sizes: Mapping[ObjectKey, int], urgent: bool, until: _Until) -> Loaded:
        waiting = deque(cut(sizes, lambda key: int(key.object_group_id)))
        in_flight: deque[_Load] = deque()
        loaded = Loaded({}, {})
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
                # It doesn't fit; another size may.
                loaded.missed.update(dict.fromkeys(waiting.popleft().keys, Miss.NO_ROOM))
                continue
            result = self._wait(in_flight[0].handle, until)
            if result is None:
                break
            part = in_flight.popleft().part
            came = _outcome(part, result)
            loaded.came.update(came)
            reasons = self._reasons(part, result, came)
            if not came and len(part.keys) > 1 and Miss.NO_ROOM in reasons.values():
                # There is no room for all of them, but perhaps for some.
                first, rest = part.split(len(part.keys) // 2)
                waiting.extendleft([*rest, first])
            else:
                loaded.missed.update(reasons)
        if in_flight:
            self._give_up([load.part for load in in_flight] + [*waiting], loaded)
            with self._lock:
                self._coming_late.update(key for load in in_flight for key in load.part.keys)
            with contextlib.suppress(RuntimeError):  # closing, when all locks go anyway
                self._late.submit(self._collect_late, list(in_flight))
        return loaded

    def _reasons(
        self, part: Slice[ObjectKey], result: PrefetchResult, came: Container[ObjectKey]
    ) -> dict[ObjectKey, Miss]:
        """Why objects did not come: what their tier said, or else that the pool took none."""
        found = result.found_cells[0] if result.found_cells else None
        with self._lock:
            return {
                key: self._said.get(
                    key, Miss.NO_ROOM if found is not None and found.test(i) else Miss.ABSENT
                )
                for i, key in enumerate(part.keys)
                if key not in came
            }

    def _give_up(self, parts: Sequence[Slice[ObjectKey]], loaded: Loaded) -> None:
        """Take back what is not under way, unless another request waits for it too."""
        keys = [key for part in parts for key in part.keys]
        loaded.missed.update(dict.fromkeys(keys, Miss.LATE))
        with self._lock:
            alone = [key for key in keys if self._waiters[key] == 1]
        self._cancel(alone)

    def _leave(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                self._waiters[key] -= 1
                if not self._waiters[key]:
                    del self._waiters[key]
                    self._said.pop(key, None)

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

    def _wait(self, handle: PrefetchHandle, until: _Until) -> PrefetchResult | None:
        while not self._closing.is_set():
            left_s = until.deadline - time.monotonic()
            if self._manager.wait_prefetch_status(handle, max(0.0, min(left_s, _CHECK_S))):
                return self._manager.query_prefetch_status(handle)
            if left_s <= 0 or until.is_gone():
                return None
        return None

    def _collect_late(self, loads: Sequence[_Load]) -> None:
        """Wait for loads that nobody waits for any more, and undo their locks."""
        for load in loads:
            result = self._wait(load.handle, _Until(math.inf, lambda: False))
            if result is not None and (came := _outcome(load.part, result)):
                self._l1.finish_read(list(came))
            with self._lock:
                self._coming_late -= Counter(load.part.keys)
        self._on_late()


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
