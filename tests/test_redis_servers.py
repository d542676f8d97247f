"""A store over several Redis servers: each has its share, and takes only that along."""

import itertools
from contextlib import closing

import pytest
from redis_server import servers_at
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.index import TokenIndex
from tailreplay.store.manifest import Manifests
from tailreplay.store.manifest_form import Entry
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.shared_index import SharedIndex

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
        evict = served.store.catalog.room.make
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


def test_a_manifest_that_can_not_be_read_now_is_not_taken_for_stale(servers):
    """The sets of children that tell of it are on other servers, and lost it for good."""
    urls, entry = [server.url for server in servers], Entry("k", 100, Provenance.EXACT)
    with closing(Manifests(servers_at(*urls), "t:", 60.0)) as manifests:
        for prefix in PREFIXES:
            for sibling in (prefix, Prefix(prefix.namespace, [*prefix.ids[:40], 5])):
                tree, prompt = TokenIndex(), sibling.prompt
                assert all(manifests.commit([(tree.block(prompt, tree.insert(prompt)), entry)]))

    wanted = {prefix.chain.prefix_hash(256) for prefix in PREFIXES}

    def found() -> int:
        clock = itertools.count(1, 10).__next__  # no question is asked too soon after another
        with closing(SharedIndex(servers_at(*urls), "t:", 1e9, clock)) as shared:
            forks = [Prefix(p.namespace, [*p.ids[:50], 5]) for p in PREFIXES]
            answers = [shared.beyond(fork.prompt, 0, 0) for fork in forks]
            near = [beyond.last for beyond in answers if beyond is not None and beyond.last]
            return sum(found.block.prefix_hash in wanted for found in near)

    assert found() == 24
    servers[0].kill()
    assert found() < 24
    servers[0].start()
    assert found() == 24
