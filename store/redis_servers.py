"""redis-py clients of the servers, for metadata; payloads have connections of our own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tailreplay.store.placement import owner
from tailreplay.store.redis_endpoint import RedisEndpoint, RedisLogin, RedisTls

if TYPE_CHECKING:
    from tailreplay.store.config import StoreConfig

_QUIET_S = 1.0


class Question(NamedTuple):
    """A command that changes nothing, or nothing that matters.

    Attributes:
        digest: what its key is placed by.
        words: the command.
        nothing: the answer of a server that has nothing.
    """

    digest: bytes
    words: tuple[Any, ...]
    nothing: Any


class RedisServers:
    """One client per server. Thread-safe.

    Args:
        endpoints: the servers, at least one.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, endpoints: Sequence[RedisEndpoint], timeout_s: float) -> None:
        self.clients = [_client(endpoint, timeout_s) for endpoint in endpoints]
        self._places = [endpoint.place for endpoint in endpoints]
        # State, under _lock: until when each server that failed is left alone.
        self._lock = threading.Lock()
        self._quiet_until = [-math.inf] * len(endpoints)

    def owner(self, digest: bytes) -> int:
        """Return the number of the server that has what is placed by `digest`."""
        return owner(self._places, digest)

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Ask each question of the server that has the answer, all of a server's at once.

        A server that failed is left alone for a second. Of several, one that fails is as one that
        has nothing: its answers are empty.

        Raises:
            redis.RedisError: all servers that were to be asked fail.
        """
        by_server: dict[int, list[int]] = {}
        for i, question in enumerate(questions):
            by_server.setdefault(self.owner(question.digest), []).append(i)
        answers: list[Any] = [question.nothing for question in questions]
        failures = []
        for server, numbers in by_server.items():
            try:
                for i, answer in zip(
                    numbers, self._ask(server, [questions[i] for i in numbers]), strict=True
                ):
                    answers[i] = answer
            except redis.RedisError as error:
                failures.append(error)
        if failures and len(failures) == len(by_server):
            raise failures[0]
        return answers

    def _ask(self, server: int, questions: Sequence[Question]) -> list[Any]:
        with self._lock:
            if len(self.clients) > 1 and time.monotonic() < self._quiet_until[server]:
                raise redis.ConnectionError(f"server {server} failed a moment ago")
        pipe = self.clients[server].pipeline(transaction=False)
        for question in questions:
            pipe.execute_command(*question.words)  # type: ignore[no-untyped-call]
        try:
            answers: list[Any] = pipe.execute()
        except redis.RedisError:
            with self._lock:
                self._quiet_until[server] = time.monotonic() + _QUIET_S
            raise
        return answers

    def close(self) -> None:
        """Close the connections."""
        for client in self.clients:
            client.close()


def redis_endpoints(config: StoreConfig) -> tuple[RedisEndpoint, ...]:
    """Return the servers that are configured, none or more.

    Raises:
        OSError: the password file can not be read.
    """
    password = ""
    if config.redis_password_file is not None:
        password = config.redis_password_file.read_text().strip()
    files = (config.redis_ca_file, config.redis_cert_file, config.redis_key_file)
    tls = RedisTls(*map(_text, files))
    login = RedisLogin(config.redis_username, password, tls)
    return tuple(RedisEndpoint.parse(url, login) for url in (config.redis_url or "").split())


def _client(endpoint: RedisEndpoint, timeout_s: float) -> redis.Redis:
    options: dict[str, Any] = {
        "db": endpoint.database,
        "username": endpoint.username or None,
        "password": endpoint.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # One attempt per call: the store decides what a failure means, not the client library.
        "retry": Retry(NoBackoff(), 0),
    }
    if isinstance(endpoint.address, str):
        options["unix_socket_path"] = endpoint.address
    else:
        options["host"], options["port"] = endpoint.address
    if endpoint.tls is not None:
        options |= {
            "ssl": True,
            "ssl_ca_certs": endpoint.tls.ca_file or None,
            "ssl_certfile": endpoint.tls.cert_file or None,
            "ssl_keyfile": endpoint.tls.key_file or endpoint.tls.cert_file or None,
        }
    return redis.Redis(**options)


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)
