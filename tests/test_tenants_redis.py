"""Tenants stay apart in Redis, over restarts, and between stores that share it."""

from contextlib import contextmanager

import lane_objects
import pytest
import redis
from lane_objects import WAIT_S
from store_objects import Prefix, span_range
from tokens_file import TENANTS, bearer, write_tokens
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

SPACE = bytes(range(32))
SYSTEM = Prefix(SPACE, range(1, 701))
MINE = Prefix(SPACE, range(5000, 5600))
WHOLE = span_range(Kind.KV, 0, 512)


@pytest.fixture
def world(redis_server, tmp_path):
    """Gives a store on one Redis with one token file, and clients by name."""
    file = write_tokens(tmp_path / "tokens.json", **TENANTS)

    @contextmanager
    def serving():
        with serve_in_thread(
            redis_url=redis_server.url, token_file=file, tier_timeout_s=WAIT_S
        ) as server:
            clients = {
                name: StoreClient(
                    server.address, credentials=bearer(tmp_path, name), match_timeout_s=WAIT_S
                )
                for name in ("acme", "rival", "root")
            }
            try:
                yield server, clients
            finally:
                for client in clients.values():
                    client.close()

    return serving


def matched(client, prefix):
    return client.match(prefix.namespace, prefix.tokens).matched_tokens


def assert_apart(clients):
    assert matched(clients["rival"], MINE) == 0
    assert matched(clients["rival"], SYSTEM) == matched(clients["acme"], SYSTEM) == 512
    for name in ("acme", "rival"):
        assert lane_objects.fetch(clients[name], SYSTEM, WHOLE)[0] == [SYSTEM.rows(Kind.KV, 0, 512)]
    rows = lane_objects.fetch(clients["acme"], MINE, span_range(Kind.KV, 0, 600))[0]
    assert rows == [MINE.rows(Kind.KV, 0, 600)]


def test_a_restart_and_a_second_store_find_the_same_for_the_same_tenants(world, redis_server):
    with world() as (first, clients):
        lane_objects.put(clients["root"], SYSTEM)
        lane_objects.put(clients["acme"], MINE)
        until(lambda: not first.store.stats().redis_pending_bytes)
        assert_apart(clients)
        with world() as (_, others):  # learns of it by way of Redis
            until(lambda: matched(others["acme"], MINE) == 600)
            until(lambda: matched(others["rival"], SYSTEM) == 512)
            assert_apart(others)
    with world() as (_, again):
        until(lambda: matched(again["acme"], MINE) == 600)
        assert_apart(again)
    with redis.Redis.from_url(redis_server.url) as values:
        for key in values.scan_iter(count=1000):
            assert SPACE not in key  # what clients call it is nobody's name there
            assert b"acme" not in key
