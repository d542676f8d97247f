"""Whether one Redis server answers: its connections, its silences and outages, and its return.

A server that gives no byte to somebody impatient is *silent*: whoever is impatient fails at once
from then on, while writes, which nobody waits for, wait on. One that refuses connections, or keeps
even the patient waiting too long, is *away*: everything fails at once. Either way a thread of the
link's own asks again, at growing intervals, and the first answer ends it.
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
        patience_s: limit for each wait of somebody impatient.
        read_timeout_s: limit for each wait of the patient.
    """

    connect_timeout_s: float
    patience_s: float
    read_timeout_s: float


class RedisLink:
    """The way to one server. Thread-safe; each connection is for one thread at a time.

    The constructor tries to connect, for `connect_timeout_s` at most; a server that is not there is
    no error.

    Args:
        endpoint: the server.
        times: how long to wait for it.
        on_silence: called when it stops answering.
    """

    def __init__(
        self, endpoint: RedisEndpoint, times: LinkTimes, on_silence: Callable[[], None]
    ) -> None:
        self.endpoint = endpoint
        self._times = times
        self._on_silence = on_silence
        # State, under _changed. `_outages` tells one time of being there from the next.
        self._changed = threading.Condition()
        self._connections: list[RespConnection] = []
        self._away = True
        self._silent = False
        self._outages = 0
        self._silences = 0
        self._closing = False
        self._last_error = ""
        if not self._mend():
            logger.warning("Redis is away: %s", self._last_error)
        self._mender = threading.Thread(
            target=self._run_mender, name="tailreplay-redis-mender", daemon=True
        )
        self._mender.start()

    @property
    def answers(self) -> bool:
        """Whether the server is neither silent nor away."""
        return not (self._away or self._silent)

    def connection(self) -> RespConnection:
        """Return a new connection, which is made with its first command and cut off by outages."""
        connection = self._new_connection()
        with self._changed:
            self._connections.append(connection)
        return connection

    def attempt(
        self,
        connection: RespConnection,
        command: Callable[[RespConnection], T],
        *,
        patient: bool = False,
    ) -> T:
        """Run a command; once more when a connection that lay idle turns out to be dead.

        Args:
            connection: one of the link's.
            command: what to do with it.
            patient: go on while the server is silent, and wait `read_timeout_s` for it.

        Raises:
            RespError: the server refused, or it does not answer.
        """
        with self._changed:
            outages = self._outages
            if self._away or (self._silent and not patient):
                if self._away:
                    connection.close()
                raise RespError(f"{self.endpoint} does not answer")
        times = self._times
        connection.set_timeout(times.read_timeout_s if patient else times.patience_s)
        if connection.is_open:
            try:
                return command(connection)
            except RespError as error:
                self._judge(error, outages, give_up=error.timed_out, patient=patient)
        try:
            return command(connection)
        except RespError as error:
            self._judge(error, outages, give_up=True, patient=patient)
            raise

    def status(self) -> dict[str, object]:
        """Report whether the server answers, why not, and how often it did not."""
        with self._changed:
            return {
                "endpoint": str(self.endpoint),
                "is_healthy": self.answers,
                "last_error": self._last_error,
                "outages": self._outages,
                "silences": self._silences,
            }

    def close(self) -> None:
        """Fail every command, those under way too."""
        with self._changed:
            self._closing = True
            self._go_away()
        self._mender.join()

    def _new_connection(self) -> RespConnection:
        return RespConnection(
            self.endpoint,
            connect_timeout_s=self._times.connect_timeout_s,
            read_timeout_s=self._times.patience_s,
        )

    def _run_mender(self) -> None:
        pause_s = BACKOFF_FIRST_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not self.answers)
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
            self._away = self._closing
            self._silent = False
            self._last_error = ""
        logger.info("Redis answers: %s", self.endpoint)
        return True

    def _judge(self, error: RespError, outages: int, *, give_up: bool, patient: bool) -> None:
        """Raise `error` unless the command deserves another connection; see how the server is."""
        if not error.closed:
            raise error
        with self._changed:
            ours = not self._away and self._outages == outages
            news = ours and give_up
            if news and error.timed_out and not patient:
                news = not self._silent
                self._silences += news
                self._silent = True
            elif news:
                self._outages += 1
                self._go_away()
            if news:
                self._last_error = str(error)
                self._changed.notify_all()
        if news:
            logger.warning("Redis does not answer: %s", error)
            self._on_silence()
        if give_up or not ours:
            raise error

    def _go_away(self) -> None:
        """Take the server for gone, and wake whoever waits for it. Called under _changed."""
        self._away = True
        for connection in self._connections:
            connection.abort()
        self._changed.notify_all()
