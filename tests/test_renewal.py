"""What is used lives on in Redis; what it is named by never outlives it."""

from contextlib import closing

import pytest
import redis
from store_objects import Prefix, put_frames, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

HOUR_S = 3600
USED, IDLE = (Prefix(bytes([i]) * 32, list(range(600))) for i in (1, 2))
HIDDENS = span_range(Kind.HIDDEN, 0, 600)


@pytest.fixture
def raw(redis_server):
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def store(redis_server, tmp_path, clock):
    config = StoreConfig(
        listen=f"unix://{tmp_path}/s.sock", pool_bytes=16 << 20, redis_url=redis_server.url
    )
    with closing(Store(config, clock=clock)) as store:
        yield store


def put(store: Store, prefix: Prefix, *kinds: Kind) -> None:
    store.put(put_frames(prefix, prefix.spans(*kinds)), lambda: None)
    until(lambda: not store.stats().redis_pending_bytes)


def fetch(store: Store, prefix: Prefix, *ranges: pb.Range) -> None:
    leaf = prefix.chain.prefix_hash(600)
    request = pb.FetchRequest(namespace=prefix.namespace, leaf=leaf, ranges=ranges)
    assert list(store.fetch(request, lambda: None))


def age(raw: redis.Redis) -> None:
    """Leaves all that is in Redis half an hour, as if it had been there for long."""
    for key in raw.keys("tailreplay:[mo]:*"):
        raw.expire(key, HOUR_S // 2)


def lives_s(raw: redis.Redis, what: str, prefix: Prefix) -> list[int]:
    space = prefix.namespace
    part = space.hex().encode() if what == "o" else space
    keys = [key for key in raw.keys(f"tailreplay:{what}:*") if part in key]
    assert keys
    return [raw.ttl(key) for key in keys]


def test_what_is_used_late_in_its_life_gets_another_with_all_that_its_manifest_names(
    store, raw, clock
):
    put(store, USED)
    put(store, IDLE)
    age(raw)
    fetch(store, USED, HIDDENS)
    assert max(lives_s(raw, "m", USED)) < HOUR_S  # it has most of its life left, by our clock
    clock.now_s += 12 * HOUR_S
    fetch(store, USED, HIDDENS)
    until(lambda: min(lives_s(raw, "m", USED)) > 22 * HOUR_S)
    # Keys and values were not asked for, but the same manifests name them.
    assert min(lives_s(raw, "o", USED)) > 23 * HOUR_S
    assert max(lives_s(raw, "m", IDLE) + lives_s(raw, "o", IDLE)) < HOUR_S
    before = raw.info("commandstats")["cmdstat_pexpire"]["calls"]
    fetch(store, USED, HIDDENS)
    assert store.catalog.redis.renew_used() == 0
    assert raw.info("commandstats")["cmdstat_pexpire"]["calls"] == before


def test_a_payload_that_has_gone_is_named_no_more_after_a_renewal(store, raw, clock):
    put(store, USED)
    (gone,) = [
        key
        for key in raw.keys("tailreplay:o:*|kv@*")
        if USED.name(Kind.KV, 256).prefix_hash.hex().encode() in key
    ]
    raw.delete(gone)
    manifest = b"tailreplay:m:" + USED.namespace + USED.chain.prefix_hash(256)
    assert raw.hexists(manifest, "k")
    clock.now_s += 12 * HOUR_S
    fetch(store, USED, HIDDENS)
    until(lambda: not raw.hexists(manifest, "k"))
    assert raw.hexists(manifest, "0")


def test_what_is_added_to_an_old_manifest_does_not_make_it_outlive_the_rest(store, raw):
    put(store, USED, Kind.KV)
    age(raw)
    put(store, USED, Kind.HIDDEN)
    manifest = b"tailreplay:m:" + USED.namespace + USED.chain.prefix_hash(256)
    assert sorted(raw.hkeys(manifest)) == [b"0", b"1", b"2", b"3", b"b", b"k"]
    assert raw.ttl(manifest) <= HOUR_S // 2
    # The object's own life in the index is its manifest's, so that its use renews it at once.
    fetch(store, USED, HIDDENS)
    until(lambda: raw.ttl(manifest) > 22 * HOUR_S)
    assert min(lives_s(raw, "o", USED)) > 23 * HOUR_S


def test_a_redis_that_is_away_renews_nothing_and_forgets_nothing(store, raw, clock, redis_server):
    put(store, USED)
    clock.now_s += 12 * HOUR_S
    redis_server.pause()
    try:
        fetch(store, USED, HIDDENS)
        assert store.tiers.renew([USED.name(Kind.KV, 256)]) == [None]
    finally:
        redis_server.resume()
    until(lambda: store.stats().redis_healthy)
    assert raw.hexists(b"tailreplay:m:" + USED.namespace + USED.chain.prefix_hash(256), "k")
