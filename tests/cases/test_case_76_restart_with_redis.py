"""LMCache#4564, #1175, #1788: after a restart Redis was not used, or counted as empty."""

import os
from contextlib import closing

import pytest
from redis_server import RedisServer
from store_objects import Client, Prefix, runs_of, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

KV, HIDDEN, CHECKPOINT = Kind
SPACES = [os.urandom(32) for _ in range(3)]
PREFIXES = [
    Prefix(space, [number, *range(tokens)])
    for space in SPACES
    for number, tokens in enumerate((40, 299, 1000))
]


def in_redis(client: Client) -> dict[int, tuple[int, int]]:
    tiers = client.stats().tiers
    return {t.kind: (t.objects, t.bytes) for t in tiers if t.tier == pb.TIER_REDIS}


@pytest.fixture(scope="module")
def usage():
    """What two stores said of one Redis, before and after a restart, and the second's client."""
    with closing(RedisServer()) as server:
        settings = {"redis_url": server.url, "pool_bytes": 16 << 20}
        with serve_in_thread(**settings) as first, closing(Client(first.address)) as client:
            for prefix in PREFIXES:
                assert client.put(prefix).dropped == 0
            until(lambda: client.stats().redis_pending_bytes == 0)
            before = in_redis(client)
        with serve_in_thread(**settings) as second, closing(Client(second.address)) as client:
            yield before, client


def test_usage_is_what_it_was_before(usage):
    before, client = usage
    assert set(before) == {KV, HIDDEN, CHECKPOINT}
    assert in_redis(client) == before


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: len(prefix))
def test_hits_resume_at_once(usage, prefix):
    _, client = usage
    longer = Prefix(prefix.namespace, [*prefix.ids, 7])
    found = client.match(longer)
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, len(prefix))]
    assert [state.token for state in found.checkpoints] == [len(prefix)]
    fetched = client.fetch(longer, span_range(KV, 0, len(prefix)))
    assert fetched.rows == {0: prefix.rows(KV, 0, len(prefix))}
