"""Room for what is put, where all that could go is on its way to Redis."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tailreplay.store.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.holdings import Holdings
    from tailreplay.store.room import Room
    from tailreplay.store.tiers import Tiers

_SOON_S = 1.0
"""What is not on its way any more can be evicted once LMCache's thread has heard of it."""

_GIVEN_UP_SHARE = 64
"""Objects are given up for this part of the pool together, since each time others have to hear."""

_MOST_WAIT = 8
"""Puts that wait at a time; each has a thread that others could want."""

_REST = 8
"""So many times as long as all who wait have looked they rest, at least: to find that nothing can
go takes as long as there is much, under the lock that lookups want, too."""
_MOST_REST_S = 0.25


class Backlog:
    """Waits for Redis, and then has the oldest objects stay out of it. Thread-safe.

    For those that put, which nobody waits for; readers take the room there is. No lock is held
    while something is waited for.

    Args:
        held: what there is.
        room: evicts.
        patience_s: longest that one Put waits for Redis. Once that has taken nothing for so long,
            nobody waits until it does.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        held: Holdings,
        room: Room,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held = held
        self._room = room
        self._patience_s = patience_s
        self._clock = clock
        self._tiers: Tiers | None = None
        # State, under _moved: who waits, how often something has come free, or may have, and since
        # when somebody has found Redis to take nothing; None = it has, since.
        self._moved = threading.Condition()
        self._waiting = 0
        self._moves = 0
        self._stalled_s: float | None = None

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers whose objects go to Redis."""
        self._tiers = tiers
        tiers.tell_released(self.note_move)

    def note_move(self) -> None:
        """Takes note that something may be evicted by now; waits for nothing."""
        if self._waiting:
            with self._moved:
                self._moves += 1
                self._moved.notify_all()

    def note_taken(self) -> None:
        """Takes note that Redis has taken something."""
        with self._moved:
            self._stalled_s = None
            self._moves += 1
            self._moved.notify_all()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._waiting

    def make_room(self, size: int, tenant: bytes | None = None, *, waited_s: float = 0.0) -> bool:
        """As `Room.make`; where nothing can go it waits for Redis, then has objects stay out of it.

        Those are the least recently used; they are in the CPU tier alone, the first to go.

        Args:
            size: wanted, bytes.
            tenant: whose objects go, because of its limits; None = anybody's.
            waited_s: how long whoever asks has waited already.
        """
        if self._room.make(size, tenant):
            return True
        if self._tiers is None or not self._held.claims.to_redis:
            return False
        if size > self._tiers.pool_bytes or not self._could_go(tenant):
            return False
        if not self._oldest(size, tenant, set()):
            # LMCache may not have let go yet of what Redis has.
            is_crowded = self._waiting >= _MOST_WAIT
            soon_s = 0.0 if is_crowded else min(_SOON_S, self._patience_s - waited_s)
            return self._wait(size, tenant, soon_s)
        if self._wait(size, tenant, self._bounded(waited_s)):
            return True
        return self._give_up(size, tenant, self._tiers) and self._wait(size, tenant, _SOON_S)

    def _could_go(self, tenant: bytes | None) -> bool:
        """Whether a tenant has anything that a wait could make go; None = there is always some."""
        if tenant is None:
            return True
        with self._held.lock:
            return bool(self._held.order.victims(1, tenant, lambda _: False))

    def _bounded(self, waited_s: float) -> float:
        """How long to wait for Redis, as of now, seconds."""
        now_s = self._clock()
        with self._moved:
            if self._stalled_s is None:
                self._stalled_s = now_s
            if self._waiting >= _MOST_WAIT:
                return 0.0
            return self._patience_s - max(waited_s, now_s - self._stalled_s)

    def _wait(self, size: int, tenant: bytes | None, limit_s: float) -> bool:
        """Waits until something could be evicted; False when that takes too long."""
        if limit_s <= 0:
            return False
        end_s = self._clock() + limit_s
        with self._moved:
            self._waiting += 1
        try:
            while True:
                seen, looked_at_s = self._moves, self._clock()
                if self._room.make(size, tenant):
                    return True
                now_s = self._clock()
                if now_s >= end_s:  # though something moves all the time
                    return False
                looked_s = now_s - looked_at_s
                self._rest(min(_REST * self._waiting * looked_s, _MOST_REST_S, end_s - now_s))
                if not self._has_moved(seen, end_s):
                    return False
        finally:
            with self._moved:
                self._waiting -= 1

    def _rest(self, seconds: float) -> None:
        """Looks at nothing for so long, whatever moves."""
        if seconds > 0:
            threading.Event().wait(seconds)

    def _has_moved(self, seen: int, end_s: float) -> bool:
        """Waits until `_moves` is another number; False when it is not at a given time."""
        with self._moved:
            return self._moved.wait_for(lambda: self._moves != seen, end_s - self._clock())

    def _give_up(self, size: int, tenant: bytes | None, tiers: Tiers) -> bool:
        """Has about so many bytes stay out of Redis; False where none can."""
        asked = wanted = max(size, tiers.pool_bytes // _GIVEN_UP_SHARE)
        given_up, tried = 0, set[Record]()
        while given_up < wanted and (some := self._oldest(asked, tenant, tried)):
            names = tiers.give_up([record.name for record in some])
            with self._held.lock:
                self._held.counts["write_backlog"] += sum(map(self._held.claims.is_pending, names))
                given_up += self._held.claims.give_up(names)
            tried.update(some)
            asked *= 2  # what is under way already can not be given up, and there may be much of it
        return given_up > 0

    def _oldest(self, size: int, tenant: bytes | None, but: set[Record]) -> list[Record]:
        """What is on its way to Redis from the CPU tier, least recently used first."""
        held = self._held
        with held.lock:
            return held.order.victims(
                size, tenant, lambda r: r in but or not held.claims.is_leaving(r.name)
            )
