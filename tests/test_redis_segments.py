"""Segments of prompts over several Redis servers: what is used together stays together."""

from contextlib import closing

import pytest
import redis
from redis_server import RedisServer
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind
from tailreplay.store.placement import SEGMENT_TOKENS, digest_of, owner
from tailreplay.store.redis_endpoint import RedisEndpoint

pytestmark = pytest.mark.redis

MIB = 1 << 20
TOKENS = 1300
"""27 objects and a state."""

PREFIXES = [Prefix(i.to_bytes(32, "big"), range(i, i + TOKENS)) for i in range(18)]


@pytest.fixture
def servers(start_redis):
    return [start_redis(persistent=True) for _ in range(3)]


@pytest.fixture
def settings(servers):
    # Too little for all of them, so that nothing is there that need not be.
    return {"redis_url": " ".join(server.url for server in servers), "pool_bytes": 16 * MIB}


def server_of(servers: list[RedisServer], prefix: Prefix, segment: int = 0) -> int:
    """Number of the server that has a segment of a prefix."""
    places = [RedisEndpoint.parse(server.url).place for server in servers]
    head = prefix.chain.prefix_hash(segment * SEGMENT_TOKENS + 64)
    return owner(places, digest_of(prefix.namespace, head))


def put_all(client: Client, prefixes=PREFIXES) -> None:
    for prefix in prefixes:
        client.put(prefix)
    until(lambda: not client.stats().redis_pending_bytes)


def comes_whole(client: Client, prefix: Prefix) -> bool:
    """Whether all kinds are matched and fetched to the end; every row must be right."""
    found = client.match(prefix)
    state = [c for c in found.checkpoints if c.token == len(prefix)]
    if found.matched_tokens < len(prefix) or not state:
        return False
    ranges = [
        span_range(Kind.CHECKPOINT, len(prefix) - 1, len(prefix), prefix_hash=state[0].prefix_hash),
        span_range(Kind.HIDDEN, 0, len(prefix)),
        span_range(Kind.KV, 0, len(prefix)),
    ]
    fetched = client.fetch(prefix, *ranges, leaf=found.leaf)
    for number, rows in fetched.rows.items():
        wanted = ranges[number]
        got = prefix.rows(Kind(wanted.kind), wanted.first_token, wanted.end_token)
        assert rows == got or number in fetched.missing
    assert {m.reason for m in fetched.missing.values()} <= {pb.MISS_REASON_DEADLINE}
    return not fetched.missing


def whole(client: Client, prefixes=PREFIXES) -> set[int]:
    return {i for i, prefix in enumerate(prefixes) if comes_whole(client, prefix)}


def test_a_server_that_dies_takes_whole_prompts_along_and_leaves_the_others_whole(
    servers, settings
):
    """Placed object by object nearly every prompt lost some of its 28."""
    everyone = set(range(len(PREFIXES)))
    share = {i for i, prefix in enumerate(PREFIXES) if server_of(servers, prefix) == 1}
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        put_all(client)
        served.store.catalog.room.make(16 * MIB)
        assert whole(client) == everyone
        served.store.catalog.room.make(16 * MIB)
        servers[1].kill()
        assert whole(client) == everyone - share
        servers[1].start()
        until(lambda: client.stats().redis_healthy)
        served.store.catalog.room.make(16 * MIB)
        assert whole(client) == everyone


def test_another_store_finds_whole_prompts_without_the_server_that_is_away(servers, settings):
    everyone = set(range(len(PREFIXES)))
    share = {i for i, prefix in enumerate(PREFIXES) if server_of(servers, prefix) == 1}
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        put_all(client)
    servers[1].kill()
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        assert whole(client) == everyone - share
        servers[1].start()
        until(lambda: client.stats().redis_healthy)
        until(lambda: whole(client) == everyone)


def commands(servers: list[RedisServer], *names: str) -> list[int]:
    """How often each server was sent any of some commands."""
    counts = []
    for server in servers:
        with closing(redis.Redis.from_url(server.url)) as raw:
            stats = raw.info("commandstats")
            counts.append(sum(stats.get(f"cmdstat_{n}", {"calls": 0})["calls"] for n in names))
    return counts


def test_a_segment_is_read_and_renewed_and_deleted_on_one_server(servers, settings):
    prefix = Prefix(bytes(31) + b"\7", range(SEGMENT_TOKENS + 300))
    first = server_of(servers, prefix)
    with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
        put_all(client, [prefix])
        with closing(redis.Redis.from_url(servers[first].url)) as raw:
            assert len(raw.keys("tailreplay:o:*")) >= 64
        served.store.catalog.room.make(16 * MIB)
        before = commands(servers, "get", "exists")
        wanted = span_range(Kind.KV, 0, SEGMENT_TOKENS)
        leaf = prefix.chain.prefix_hash(SEGMENT_TOKENS)
        assert client.fetch(prefix, wanted, leaf=leaf).rows == {
            0: prefix.rows(Kind.KV, 0, SEGMENT_TOKENS)
        }
        after = commands(servers, "get", "exists")
        # Each is asked for its epoch twice a second; of a segment there is one question per block.
        asked = {i for i in range(3) if after[i] - before[i] >= 64}
        assert asked == {first}
        records = served.store.catalog.select(lambda record: record.in_redis)
        assert len(records) == len(prefix.spans())
        names = [record.name for record in records]
        assert served.store.tiers.renew(names) == [True] * len(names)
        served.store.catalog.lost(*records)
        served.store.tiers.delete(names)
        for server in servers:
            with closing(redis.Redis.from_url(server.url)) as raw:
                assert not raw.keys("tailreplay:o:*")
