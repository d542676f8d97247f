"""LMCache#4564, #1175, #1788: after a restart Redis was not used, or counted as empty."""

import os
from contextlib import closing

import pytest
import redis
from redis_server import RedisServer
from store_objects import Client, Prefix, runs_of, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.objects import Kind
from tailreplay.store.redis_envelope import ENVELOPE_BYTES

pytestmark = pytest.mark.redis

KV, HIDDEN, CHECKPOINT = Kind
SPACES = [os.urandom(32) for _ in range(3)]
PREFIXES = [
    Prefix(space, [number, *range(tokens)])
    for space in SPACES
    for number, tokens in enumerate((40, 299, 1000))
]


def in_redis(client: Client | Store) -> dict[int, tuple[int, int]]:
    tiers = client.stats().tiers
    return {t.kind: (t.objects, t.bytes) for t in tiers if t.tier == pb.TIER_REDIS}


def truth(raw: redis.Redis) -> tuple[int, int]:
    """Objects and their bytes as Redis itself counts them."""
    sizes = [raw.strlen(key) - ENVELOPE_BYTES for key in raw.scan_iter("tailreplay:o:*")]
    return len(sizes), sum(sizes)


def said(client: Client | Store) -> tuple[int, int]:
    """The same, as a store says it."""
    objects, sizes = zip(*in_redis(client).values(), strict=True)
    return sum(objects), sum(sizes)


@pytest.fixture(scope="module")
def usage():
    """What two stores said of one Redis, over a restart; the second's client, and that Redis."""
    with closing(RedisServer()) as server, closing(redis.Redis.from_url(server.url)) as raw:
        settings = {"redis_url": server.url, "pool_bytes": 16 << 20}
        with serve_in_thread(**settings) as first, closing(Client(first.address)) as client:
            for prefix in PREFIXES:
                assert client.put(prefix).dropped == 0
            until(lambda: client.stats().redis_pending_bytes == 0)
            before = in_redis(client)
        with serve_in_thread(**settings) as second, closing(Client(second.address)) as client:
            yield before, client, raw


def test_usage_is_what_it_was_before_and_what_redis_has(usage):
    before, client, raw = usage
    assert set(before) == {KV, HIDDEN, CHECKPOINT}
    assert in_redis(client) == before
    assert said(client) == truth(raw)


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: len(prefix))
def test_hits_resume_at_once(usage, prefix):
    _, client, _ = usage
    longer = Prefix(prefix.namespace, [*prefix.ids, 7])
    found = client.match(longer)
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, len(prefix))]
    assert [state.token for state in found.checkpoints] == [len(prefix)]
    fetched = client.fetch(longer, span_range(KV, 0, len(prefix)))
    assert fetched.rows == {0: prefix.rows(KV, 0, len(prefix))}


def test_usage_follows_payloads_that_go_behind_the_stores_back(usage, clock, tmp_path):
    """Manifests still speak of them, which is what usage was counted by until they expired."""
    before, _, raw = usage
    gone = sorted(raw.keys("tailreplay:o:*"))[::2]
    raw.delete(*gone)
    assert truth(raw)[0] == sum(objects for objects, _ in before.values()) - len(gone)
    port = raw.connection_pool.connection_kwargs["port"]
    config = StoreConfig(
        listen=f"unix://{tmp_path}/s.sock",
        redis_url=f"redis://127.0.0.1:{port}",
        pool_bytes=16 << 20,
    )
    with closing(Store(config, clock=clock)) as store:
        assert said(store) > truth(raw)

        def is_true() -> bool:
            clock.now_s += 60
            return said(store) == truth(raw)

        until(is_true)
