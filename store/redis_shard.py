"""One Redis server: its worker threads, what they do first, and what happens while it is away.

While a shard is down nothing waits for it: lookups find nothing, loads and stores fail. A thread
of its own connects again, at growing intervals, and the first answer brings the shard back.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import TypeVar

from tailreplay.store.redis_envelope import ENVELOPE_BYTES, is_intact, seal
from tailreplay.store.resp import RedisEndpoint, RespConnection, RespError

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 2.0


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How to use one Redis server.

    Attributes:
        workers: threads, and connections, that move payloads; with 2 or more, one of them is kept
            for urgent loads.
        connect_timeout_s: limit for making a connection.
        read_timeout_s: limit for each wait for the server.
        ttl_s: seconds until a stored value expires.
    """

    workers: int = 3
    connect_timeout_s: float = 0.5
    read_timeout_s: float = 2.0
    ttl_s: int = 86400


@dataclass(slots=True)
class ShardCounters:
    """What happened since the start, in keys unless the name says otherwise.

    loads = loaded + absent + integrity_errors + load_failures, and stores = stored + refused +
    store_failures, once nothing is in flight.
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
    stores: int = 0
    stored: int = 0
    stored_bytes: int = 0
    refused: int = 0
    """Stores that the server answered with an error, such as OOM."""
    store_failures: int = 0
    deletes: int = 0


class Priority(enum.IntEnum):
    """What workers do first."""

    URGENT_LOAD = 0
    LOAD = 1
    STORE = 2


_Job = Callable[[RespConnection | None], None]
"""Work on a connection, None when the server is away; ends by telling the caller."""

T = TypeVar("T")


class RedisShard:
    """Loads and stores on one Redis server, in order of priority, on threads of its own.

    Every method returns at once; `done` is called exactly once, on another thread or, when the
    shard is down, before the method returns. The constructor tries to connect, for
    `connect_timeout_s` at most; a server that is not there is no error.
    """

    def __init__(self, endpoint: RedisEndpoint, settings: ShardSettings) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._sequence = itertools.count()
        # State, under _lock. `_outages` tells one time of being up from the next.
        self._lock = threading.Lock()
        self._any_job = threading.Condition(self._lock)
        self._urgent_job = threading.Condition(self._lock)
        self._control_job = threading.Condition(self._lock)
        self._outage = threading.Condition(self._lock)
        self._jobs: list[tuple[Priority, int, _Job]] = []
        self._control: deque[_Job] = deque()
        self._connections: list[RespConnection] = []
        self._up = False
        self._outages = 0
        self._closing = False
        self._last_error = ""
        self._counters = ShardCounters()
        if not self._mend():
            logger.warning("Redis is down: %s", self._last_error)
        self._threads = [
            self._start("mender", self._run_mender),
            self._start("control", self._run_control),
            *(self._start(f"worker-{i}", self._run_worker, i) for i in range(settings.workers)),
        ]

    def load(
        self, key: bytes, into: memoryview, *, urgent: bool, done: Callable[[bool], None]
    ) -> None:
        """Read the payload stored under `key`; `done(True)` when `into` holds it whole and right.

        `into` must stay valid until `done`, and may hold rubbish after `done(False)`.
        """
        priority = Priority.URGENT_LOAD if urgent else Priority.LOAD
        self._submit(priority, lambda connection: done(self._load(connection, key, into)))

    def store(self, key: bytes, payload: memoryview, *, done: Callable[[bool], None]) -> None:
        """Write a payload under `key`; it must stay as it is until `done`."""
        self._submit(Priority.STORE, lambda connection: done(self._store(connection, key, payload)))

    def lookup(self, keys: Sequence[bytes], *, done: Callable[[list[bool]], None]) -> None:
        """Say for each key whether it is stored, past any loads and stores in the queue."""
        self._submit_control(lambda connection: done(self._lookup(connection, keys)))

    def delete(self, keys: Sequence[bytes], *, done: Callable[[bool], None]) -> None:
        """Delete keys; `done(False)` when the server was not there to do it."""
        self._submit_control(lambda connection: done(self._delete(connection, keys)))

    def status(self) -> dict[str, object]:
        """Report whether the last contact worked, why not, and the counters."""
        with self._lock:
            return {
                "endpoint": str(self.endpoint),
                "is_healthy": self._up,
                "last_error": self._last_error,
                "outages": self._outages,
                "queued": len(self._jobs),
                **asdict(self._counters),
            }

    def close(self) -> None:
        """Stop at once: what is queued or under way fails. No caller's memory is touched after."""
        with self._lock:
            self._closing = True
            jobs = self._cut_off()
            for wakeup in (self._any_job, self._urgent_job, self._control_job, self._outage):
                wakeup.notify_all()
        for job in jobs:
            _do(job, None)
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=args, name=f"tailreplay-redis-{name}", daemon=True
        )
        thread.start()
        return thread

    def _connection(self) -> RespConnection:
        return RespConnection(
            self.endpoint,
            connect_timeout_s=self._settings.connect_timeout_s,
            read_timeout_s=self._settings.read_timeout_s,
        )

    def _submit(self, priority: Priority, job: _Job) -> None:
        with self._lock:
            if accepted := self._up:
                heapq.heappush(self._jobs, (priority, next(self._sequence), job))
                self._any_job.notify()
                if priority is Priority.URGENT_LOAD:
                    self._urgent_job.notify()
        if not accepted:
            _do(job, None)

    def _submit_control(self, job: _Job) -> None:
        with self._lock:
            if accepted := self._up:
                self._control.append(job)
                self._control_job.notify()
        if not accepted:
            _do(job, None)

    def _run_worker(self, number: int) -> None:
        urgent_only = number == 0 and self._settings.workers > 1
        with self._serving() as connection:
            while (job := self._next_job(urgent_only=urgent_only)) is not None:
                _do(job, connection)

    def _next_job(self, *, urgent_only: bool) -> _Job | None:
        wakeup = self._urgent_job if urgent_only else self._any_job
        last = Priority.URGENT_LOAD if urgent_only else Priority.STORE
        with self._lock:
            while not self._closing and not (self._jobs and self._jobs[0][0] <= last):
                wakeup.wait()
            return None if self._closing else heapq.heappop(self._jobs)[2]

    def _run_control(self) -> None:
        with self._serving() as connection:
            while (job := self._next_control_job()) is not None:
                _do(job, connection)

    def _next_control_job(self) -> _Job | None:
        with self._lock:
            while not self._closing and not self._control:
                self._control_job.wait()
            return None if self._closing else self._control.popleft()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[RespConnection]:
        """Give a thread its connection, known to `_cut_off` while the thread lives."""
        connection = self._connection()
        with self._lock:
            self._connections.append(connection)
        try:
            yield connection
        finally:
            connection.close()

    def _run_mender(self) -> None:
        pause_s = BACKOFF_FIRST_S
        while True:
            with self._lock:
                while self._up and not self._closing:
                    self._outage.wait()
                if not self._closing:
                    self._outage.wait(pause_s)
                if self._closing:
                    return
            pause_s = BACKOFF_FIRST_S if self._mend() else min(2 * pause_s, BACKOFF_LAST_S)

    def _mend(self) -> bool:
        """Try to reach the server, and declare the shard up when it answers."""
        connection = self._connection()
        try:
            connection.connect()
        except RespError as error:
            with self._lock:
                self._last_error = str(error)
            return False
        connection.close()
        with self._lock:
            self._up = not self._closing
            self._last_error = ""
        logger.info("Redis is up: %s", self.endpoint)
        return True

    def _attempt(
        self, connection: RespConnection | None, command: Callable[[RespConnection], T]
    ) -> T:
        """Run a command; once more when a connection that lay idle turns out to be dead.

        Raises:
            RespError: the server refused, or could not be reached and the shard is down now.
        """
        outages = self._outages
        if connection is None:
            raise RespError(f"{self.endpoint} is down")
        if connection.is_open:
            try:
                return command(connection)
            except RespError as error:
                self._judge(error, outages, give_up=error.timed_out)
        try:
            return command(connection)
        except RespError as error:
            self._judge(error, outages, give_up=True)
            raise

    def _judge(self, error: RespError, outages: int, *, give_up: bool) -> None:
        """Raise `error` unless the command deserves another connection; see whether we are down."""
        if not error.closed:
            raise error
        with self._lock:
            ours = self._up and self._outages == outages
            jobs: list[_Job] = []
            if ours and give_up:
                self._outages += 1
                self._last_error = str(error)
                jobs = self._cut_off()
                self._outage.notify()
        if ours and give_up:
            logger.warning("Redis is down: %s", error)
        for job in jobs:
            _do(job, None)
        if give_up or not ours:
            raise error

    def _cut_off(self) -> list[_Job]:
        """Go down: wake threads that wait for the server, and return the jobs nobody will do.

        Called under _lock.
        """
        self._up = False
        jobs = [job for _, _, job in sorted(self._jobs, key=itemgetter(0, 1))] + [*self._control]
        self._jobs.clear()
        self._control.clear()
        for connection in self._connections:
            connection.abort()
        return jobs

    def _load(self, connection: RespConnection | None, key: bytes, into: memoryview) -> bool:
        envelope = bytearray(ENVELOPE_BYTES)
        parts = (memoryview(envelope), into)
        try:
            length = self._attempt(connection, lambda c: c.get_into(key, parts))
        except RespError as error:
            if error.code != "WRONGTYPE":
                self._count(loads=1, load_failures=1)
                return False
            length = 0
        if length is None:
            self._count(loads=1, absent=1)
            return False
        if length != ENVELOPE_BYTES + len(into) or not is_intact(bytes(envelope), key, into):
            self._count(loads=1, integrity_errors=1)
            self._delete(connection, [key])
            return False
        self._count(loads=1, loaded=1, loaded_bytes=len(into))
        return True

    def _store(self, connection: RespConnection | None, key: bytes, payload: memoryview) -> bool:
        try:
            parts = (memoryview(seal(key, payload)), payload)
            ttl_ms = self._settings.ttl_s * 1000
            self._attempt(connection, lambda c: c.set(key, parts, ttl_ms=ttl_ms))
        except RespError as error:
            self._count(stores=1, refused=not error.closed, store_failures=error.closed)
            return False
        self._count(stores=1, stored=1, stored_bytes=len(payload))
        return True

    def _lookup(self, connection: RespConnection | None, keys: Sequence[bytes]) -> list[bool]:
        try:
            found = self._attempt(connection, lambda c: c.exists(keys))
        except RespError:
            found = [False] * len(keys)
        self._count(lookups=len(keys), lookup_hits=sum(found))
        return found

    def _delete(self, connection: RespConnection | None, keys: Sequence[bytes]) -> bool:
        try:
            deleted = self._attempt(connection, lambda c: c.delete(keys))
        except RespError:
            return False
        self._count(deletes=deleted)
        return True

    def _count(self, **steps: int) -> None:
        with self._lock:
            for counter, step in steps.items():
                setattr(self._counters, counter, getattr(self._counters, counter) + step)


def _do(job: _Job, connection: RespConnection | None) -> None:
    """Run a job; a caller whose `done` raises must not take the shard's thread along."""
    try:
        job(connection)
    except Exception:
        logger.exception("a caller failed to take its outcome")
