"""Adapters on a real Redis, and a connection to tamper with it."""

import pytest
from redis_driver import Driver

from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.resp import RespConnection


@pytest.fixture
def open_driver():
    drivers = []

    def open_one(*urls: str, **options) -> Driver:
        drivers.append(Driver(*urls, **{"read_timeout_s": 10, "patience_s": 10} | options))
        return drivers[-1]

    yield open_one
    for driver in drivers:
        driver.adapter.close()


@pytest.fixture
def driver(open_driver, redis_server) -> Driver:
    return open_driver(redis_server.url)


@pytest.fixture
def redis(redis_server):
    connection = RespConnection(
        RedisEndpoint.parse(redis_server.url), connect_timeout_s=5, read_timeout_s=10
    )
    yield connection
    connection.close()
