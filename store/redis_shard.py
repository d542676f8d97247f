"""One Redis server: its worker threads, what they do first, and what they find there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_envelope import Content, Envelope
from tailreplay.store.redis_jobs import Job, JobQueue, Load, Outcome, Priority, Store
from tailreplay.store.redis_link import LinkTimes, RedisLink
from tailreplay.store.resp import RespConnection, RespError, Value
from tailreplay.store.urgent_gate import UrgentGate

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How to use one Redis server.

    Attributes:
        workers: threads, and connections, that move payloads; with 2 or more, one of them is kept
            for urgent loads.
        connect_timeout_s: limit for making a connection.
        patience_s: limit for each wait for the server in a lookup or load; one that is silent for
            so long costs every request that once, and none until it answers again.
        read_timeout_s: the same in a store, which nobody waits for.
        ttl_s: seconds until a stored value expires.
    """

    workers: int = 3
    connect_timeout_s: float = 0.5
    patience_s: float = 0.2
    read_timeout_s: float = 5.0
    ttl_s: int = 86400


@dataclass(slots=True)
class ShardCounters:
    """What happened since the start, in keys unless the name says otherwise.

    loads = loaded + absent + integrity_errors + load_failures + cancelled, and stores = stored +
    refused + store_failures + given_up, once nothing is in flight.
    """

    lookups: int = 0
    lookup_hits: int = 0
    loads: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    absent: int = 0
    integrity_errors: int = 0
    """Values that were truncated, damaged, another key's or of another type; all were deleted."""
    load_failures: int = 0
    cancelled: int = 0
    """Loads that were taken back before they began."""
    stores: int = 0
    stored: int = 0
    stored_bytes: int = 0
    refused: int = 0
    """Stores that the server answered with an error, such as OOM."""
    store_failures: int = 0
    given_up: int = 0
    """Stores that were taken back before they began."""
    deletes: int = 0


_Control = Callable[[RespConnection], None]
"""A short command; ends by telling the caller."""

_COUNTED_AS = {
    Outcome.LOADED: "loaded",
    Outcome.ABSENT: "absent",
    Outcome.DAMAGED: "integrity_errors",
    Outcome.AWAY: "load_failures",
    Outcome.CANCELLED: "cancelled",
}
_MEANS = {
    Content.GOOD: Outcome.LOADED,
    Content.WRONG: Outcome.DAMAGED,
    Content.FOREIGN: Outcome.ABSENT,
}


class RedisShard:
    """Loads and stores on one Redis server, in order of priority, on threads of its own.

    Every method returns at once; what was asked for is told its outcome exactly once, on another
    thread or, of loads from a server that does not answer, before the method returns.

    Args:
        endpoint: the server.
        settings: how to use it.
        gate: what urgent loads pass first; shared by the shards that share a link.
        envelope: the form of values in Redis.
    """

    def __init__(
        self,
        endpoint: RedisEndpoint,
        settings: ShardSettings,
        gate: UrgentGate,
        envelope: Envelope,
    ) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._gate = gate
        self._envelope = envelope
        # State, under _lock.
        self._lock = threading.Lock()
        self._any_job = threading.Condition(self._lock)
        self._urgent_job = threading.Condition(self._lock)
        self._control_job = threading.Condition(self._lock)
        self._jobs = JobQueue()
        self._control: deque[_Control] = deque()
        self._closing = False
        self._counters = ShardCounters()
        times = LinkTimes(settings.connect_timeout_s, settings.patience_s, settings.read_timeout_s)
        self._link = RedisLink(endpoint, times, self._fail_loads)
        self._threads = [
            _start("control", self._run_control),
            *(_start(f"worker-{i}", self._run_worker, i) for i in range(settings.workers)),
        ]

    def load(self, load: Load) -> None:
        """Read a payload; its memory must stay valid until it is done."""
        if load.urgent:
            self._gate.enter()
        if self._link.answers:
            self._submit(load)
        else:
            self._end_load(load, Outcome.AWAY)

    def store(self, store: Store) -> None:
        """Write a payload, which must stay as it is until that is done."""
        self._submit(store)

    def cancel(self, keys: Collection[bytes]) -> None:
        """Take back loads of some keys, but for those under way."""
        with self._lock:
            gone = self._jobs.remove_loads(lambda load: load.key in keys)
        for load in gone:
            self._end_load(load, Outcome.CANCELLED)

    def queued(self, stores: Collection[Store]) -> list[Store]:
        """Say which of some stores have not begun."""
        with self._lock:
            return self._jobs.stores_among(stores)

    def take_back(self, stores: Collection[Store]) -> list[Store]:
        """Take back those of some stores that have not begun; the caller tells their outcome."""
        with self._lock:
            gone = self._jobs.remove_stores(stores)
        self._count(stores=len(gone), given_up=len(gone))
        return gone

    def lookup(self, keys: Sequence[bytes], *, done: Callable[[list[bool] | None], None]) -> None:
        """Say for each key whether it is stored, past any loads and stores in the queue.

        `done(None)` when the server was not there to say it.
        """
        self._submit_control(lambda connection: done(self._lookup(connection, keys)))

    def delete(self, keys: Sequence[bytes], *, done: Callable[[bool], None]) -> None:
        """Delete keys; `done(False)` when the server was not there to do it."""
        self._submit_control(lambda connection: done(self._delete(connection, keys)))

    def renew(self, keys: Sequence[bytes], *, done: Callable[[list[bool] | None], None]) -> None:
        """Let values live as long as new ones; says for each whether it is there, as `lookup`."""
        self._submit_control(lambda connection: done(self._renew(connection, keys)))

    def look(
        self, look: Callable[[RespConnection], T], *, done: Callable[[T | RespError], None]
    ) -> None:
        """Ask what changes nothing, past any loads and stores in the queue; or say why not."""

        def command(connection: RespConnection) -> None:
            try:
                answer: T | RespError = self._link.attempt(connection, look)
            except RespError as error:
                answer = error
            done(answer)

        self._submit_control(command)

    def status(self) -> dict[str, object]:
        """Report whether the last contact worked, why not, and the counters."""
        link = self._link.status()
        with self._lock:
            return {**link, "queued": len(self._jobs), **asdict(self._counters)}

    def close(self) -> None:
        """Stop at once: what is queued or under way fails. No caller's memory is touched after."""
        self._link.close()
        with self._lock:
            self._closing = True
            for wakeup in (self._any_job, self._urgent_job, self._control_job):
                wakeup.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, job: Job) -> None:
        with self._lock:
            self._jobs.add(job)
            self._any_job.notify()
            if job.priority is Priority.URGENT_LOAD:
                self._urgent_job.notify()

    def _submit_control(self, command: _Control) -> None:
        with self._lock:
            self._control.append(command)
            self._control_job.notify()

    def _run_worker(self, number: int) -> None:
        urgent_only = number == 0 and self._settings.workers > 1
        connection = self._link.connection()
        while jobs := self._next_jobs(urgent_only=urgent_only):
            if isinstance(jobs[0], Store):
                self._store(connection, jobs[0])
            else:
                self._load(connection, [job for job in jobs if isinstance(job, Load)])
        connection.close()

    def _next_jobs(self, *, urgent_only: bool) -> list[Job]:
        """Wait for work; nothing when there is none and will be none."""
        wakeup = self._urgent_job if urgent_only else self._any_job
        last = Priority.URGENT_LOAD if urgent_only else Priority.STORE
        with self._lock:
            while not self._jobs.has(last):
                if self._closing:
                    return []
                wakeup.wait()
            return self._jobs.take()

    def _fail_loads(self) -> None:
        with self._lock:
            gone = self._jobs.remove_loads(lambda load: True)
        for load in gone:
            self._end_load(load, Outcome.AWAY)

    def _run_control(self) -> None:
        connection = self._link.connection()
        while (command := self._next_control()) is not None:
            _safely(command, connection)
        connection.close()

    def _next_control(self) -> _Control | None:
        with self._lock:
            while not self._control:
                if self._closing:
                    return None
                self._control_job.wait()
            return self._control.popleft()

    def _load(self, connection: RespConnection, loads: Sequence[Load]) -> None:
        between = None if loads[0].urgent else self._give_way
        if between is not None:
            between()
        rooms = [self._envelope.room(load.into) for load in loads]
        values = [Value(load.key, room) for load, room in zip(loads, rooms, strict=True)]
        try:
            answers = self._link.attempt(connection, lambda c: c.get_many(values, between))
        except RespError:
            for load in loads:
                self._end_load(load, Outcome.AWAY)
            return
        for load, room, answer in zip(loads, rooms, answers, strict=True):
            outcome = self._outcome(load, room, answer)
            if outcome is Outcome.DAMAGED:
                self._delete(connection, [load.key])
            self._end_load(load, outcome)

    def _outcome(
        self, load: Load, room: Sequence[memoryview], answer: int | RespError | None
    ) -> Outcome:
        if answer is None:
            return Outcome.ABSENT
        if isinstance(answer, RespError) and answer.code != "WRONGTYPE":
            return Outcome.AWAY
        if answer != sum(map(len, room)):
            return Outcome.DAMAGED
        return _MEANS[self._envelope.unwrap(load.key, room, load.into)]

    def _give_way(self) -> None:
        """Let urgent loads pass, unless there is no other worker to do them."""
        if self._settings.workers > 1:
            self._gate.wait()

    def _end_load(self, load: Load, outcome: Outcome) -> None:
        loaded_bytes = len(load.into) if outcome is Outcome.LOADED else 0
        self._count(loads=1, loaded_bytes=loaded_bytes, **{_COUNTED_AS[outcome]: 1})
        if load.urgent:
            self._gate.leave()
        _safely(load.done, outcome)

    def _store(self, connection: RespConnection, store: Store) -> None:
        self._give_way()
        parts = self._envelope.wrap(store.key, store.payload)
        ttl_ms, between = self._settings.ttl_s * 1000, self._give_way
        try:
            self._link.attempt(
                connection,
                lambda c: c.set(store.key, parts, ttl_ms=ttl_ms, between=between),
                patient=True,
            )
        except RespError as error:
            self._count(stores=1, refused=not error.closed, store_failures=error.closed)
            _safely(store.done, False)
            return
        self._count(stores=1, stored=1, stored_bytes=len(store.payload))
        _safely(store.done, True)

    def _lookup(self, connection: RespConnection, keys: Sequence[bytes]) -> list[bool] | None:
        try:
            found = self._link.attempt(connection, lambda c: c.exists(keys))
        except RespError:
            self._count(lookups=len(keys))
            return None
        self._count(lookups=len(keys), lookup_hits=sum(found))
        return found

    def _renew(self, connection: RespConnection, keys: Sequence[bytes]) -> list[bool] | None:
        ttl_ms = self._settings.ttl_s * 1000
        try:
            return self._link.attempt(connection, lambda c: c.expire(keys, ttl_ms=ttl_ms))
        except RespError:
            return None

    def _delete(self, connection: RespConnection, keys: Sequence[bytes]) -> bool:
        try:
            deleted = self._link.attempt(connection, lambda c: c.delete(keys))
        except RespError:
            return False
        self._count(deletes=deleted)
        return True

    def _count(self, **steps: int) -> None:
        with self._lock:
            for counter, step in steps.items():
                setattr(self._counters, counter, getattr(self._counters, counter) + step)


def _start(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(
        target=target, args=args, name=f"tailreplay-redis-{name}", daemon=True
    )
    thread.start()
    return thread


def _safely(tell: Callable[..., None], argument: object) -> None:
    """Tell a caller its outcome; one that raises must not take the shard's thread along."""
    try:
        tell(argument)
    except Exception:
        logger.exception("a caller failed to take its outcome")
