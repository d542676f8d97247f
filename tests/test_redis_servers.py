"""A store over several Redis servers: each has its share, and takes only that along."""

from contextlib import closing

import pytest
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

PREFIXES = [Prefix(i.to_bytes(32, "big"), list(range(256))) for i in range(24)]
MIB = 1 << 20


@pytest.fixture
def servers(start_redis):
    return [start_redis(persistent=True) for _ in range(3)]


@pytest.fixture
def settings(servers):
    return {"redis_url": " ".join(s.url for s in servers), "pool_bytes": 16 * MIB}


def hits(client: Client) -> set[int]:
    """Numbers of the prefixes whose keys and values come; the others are late, none is lost."""
    came = set()
    for number, prefix in enumerate(PREFIXES):
        fetched = client.fetch(
            prefix, span_range(Kind.KV, 0, 256), leaf=prefix.chain.prefix_hash(256)
        )
        if fetched.rows:
            assert fetched.rows == {0: prefix.rows(Kind.KV, 0, 256)}
            came.add(number)
        else:
            assert fetched.missing[0].reason == pb.MISS_REASON_DEADLINE
    return came


def test_a_server_that_dies_takes_its_share_along_and_brings_it_back(servers, settings):
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        for prefix in PREFIXES:
            client.put(prefix, prefix.spans(Kind.KV))
        until(lambda: not client.stats().redis_pending_bytes)
        shards = served.store.tiers.redis_status()["shards"]
        assert min(shard["stored"] for shard in shards) > 0
        evict = served.store.catalog.make_room
        evict(16 * MIB)
        assert hits(client) == set(range(24))
        evict(16 * MIB)
        servers[1].kill()
        assert len(hits(client)) == 24 - shards[1]["stored"]
        assert client.stats().redis_healthy is False
        servers[1].start()
        until(lambda: client.stats().redis_healthy, limit_s=5)
        evict(16 * MIB)
        assert hits(client) == set(range(24))


def test_a_store_that_starts_without_one_lists_its_share_when_it_comes(servers, settings):
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        for prefix in PREFIXES:
            client.put(prefix, prefix.spans(Kind.KV))
        until(lambda: not client.stats().redis_pending_bytes)
    servers[2].kill()
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:

        def listed() -> int:
            return sum(client.match(prefix).matched_tokens == 256 for prefix in PREFIXES)

        assert 0 < listed() < 24
        servers[2].start()
        until(lambda: listed() == 24, limit_s=5)
        assert hits(client) == set(range(24))


def test_other_stores_find_what_a_dead_server_does_not_have(servers, settings):
    """Looking into Redis for what the local index lacks goes on with the servers that are there."""
    with (
        serve_in_thread(**settings) as first,
        serve_in_thread(**settings) as second,
        closing(Client(first.address)) as writer,
        closing(Client(second.address)) as reader,
    ):
        for prefix in PREFIXES:
            writer.put(prefix, prefix.spans(Kind.KV))
        until(lambda: not writer.stats().redis_pending_bytes)
        servers[0].kill()

        def found() -> int:
            return sum(reader.match(prefix).matched_tokens == 256 for prefix in PREFIXES)

        until(lambda: 0 < found() < 24)
        servers[0].start()
        until(lambda: found() == 24)
