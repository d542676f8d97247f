"""What all tests share: LMCache reports to nobody and prints nothing; a real Redis on demand."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from redis_server import RedisServer, servers_at
from waiting import Clock

from tailreplay.store.redis_tables import RedisTables

os.environ.update(
    LMCACHE_TRACK_USAGE="false",
    LMCACHE_LOG_LEVEL="ERROR",
    LMCACHE_DISABLE_BANNER="1",
    DO_NOT_TRACK="1",
    # A machine that is busy with other tests may be silent for longer than a cache should wait.
    TAILREPLAY_REDIS_PATIENCE_S="5",
)


@pytest.fixture
def clock() -> Clock:
    """Moves when a test says so."""
    return Clock()


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts servers with given settings; all end with the test."""
    servers = []

    def start(**settings) -> RedisServer:
        servers.append(RedisServer(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def redis_server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    """An empty server on a loopback port, for this test alone."""
    return start_redis()


@pytest.fixture
def tables(redis_server: RedisServer) -> Iterator[RedisTables]:
    """A store's tables on that server."""
    with closing(RedisTables(servers_at(redis_server.url), "tailreplay:")) as tables:
        yield tables
