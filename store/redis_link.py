"""Whether one Redis server is there: its connections, its outages, and its return.

While the server is away every command fails at once. A thread of the link's own connects again, at
growing intervals, and the first answer brings the link back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.resp import RespConnection, RespError

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How long to wait for a server.

    Attributes:
        connect_timeout_s: limit for making a connection.
        read_timeout_s: limit for each wait for the server.
    """

    connect_timeout_s: float
    read_timeout_s: float


class RedisLink:
    """The way to one server. Thread-safe; each connection is for one thread at a time.

    The constructor tries to connect, for `connect_timeout_s` at most; a server that is not there is
    no error.
    """

    def __init__(self, endpoint: RedisEndpoint, times: LinkTimes) -> None:
        self.endpoint = endpoint
        self._times = times
        # State, under _changed. `_outages` tells one time of being up from the next.
        self._changed = threading.Condition()
        self._connections: list[RespConnection] = []
        self._up = False
        self._outages = 0
        self._closing = False
        self._last_error = ""
        if not self._mend():
            logger.warning("Redis is down: %s", self._last_error)
        self._mender = threading.Thread(
            target=self._run_mender, name="tailreplay-redis-mender", daemon=True
        )
        self._mender.start()

    def connection(self) -> RespConnection:
        """Return a new connection, which is made with its first command and cut off by outages."""
        connection = self._new_connection()
        with self._changed:
            self._connections.append(connection)
        return connection

    def attempt(self, connection: RespConnection, command: Callable[[RespConnection], T]) -> T:
        """Run a command; once more when a connection that lay idle turns out to be dead.

        Raises:
            RespError: the server refused, or it is away.
        """
        with self._changed:
            outages = self._outages
            if not self._up:
                connection.close()
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

    def status(self) -> dict[str, object]:
        """Report whether the last contact worked, and why not."""
        with self._changed:
            return {
                "endpoint": str(self.endpoint),
                "is_healthy": self._up,
                "last_error": self._last_error,
                "outages": self._outages,
            }

    def close(self) -> None:
        """Fail every command, those under way too."""
        with self._changed:
            self._closing = True
            self._cut_off()
            self._changed.notify_all()
        self._mender.join()

    def _new_connection(self) -> RespConnection:
        return RespConnection(
            self.endpoint,
            connect_timeout_s=self._times.connect_timeout_s,
            read_timeout_s=self._times.read_timeout_s,
        )

    def _run_mender(self) -> None:
        pause_s = BACKOFF_FIRST_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not self._up)
                self._changed.wait_for(lambda: self._closing, pause_s)
                if self._closing:
                    return
            pause_s = BACKOFF_FIRST_S if self._mend() else min(2 * pause_s, BACKOFF_LAST_S)

    def _mend(self) -> bool:
        """Try to reach the server, and declare it there when it answers."""
        connection = self._new_connection()
        try:
            connection.connect()
        except RespError as error:
            with self._changed:
                self._last_error = str(error)
            return False
        connection.close()
        with self._changed:
            self._up = not self._closing
            self._last_error = ""
        logger.info("Redis is up: %s", self.endpoint)
        return True

    def _judge(self, error: RespError, outages: int, *, give_up: bool) -> None:
        """Raise `error` unless the command deserves another connection; see whether we are down."""
        if not error.closed:
            raise error
        with self._changed:
            ours = self._up and self._outages == outages
            if ours and give_up:
                self._outages += 1
                self._last_error = str(error)
                self._cut_off()
                self._changed.notify_all()
        if ours and give_up:
            logger.warning("Redis is down: %s", error)
        if give_up or not ours:
            raise error

    def _cut_off(self) -> None:
        """Go down, and wake threads that wait for the server. Called under _changed."""
        self._up = False
        for connection in self._connections:
            connection.abort()
