"""The store over gRPC with a real Redis behind it: restarts, damage and outages."""

import os
import threading
from contextlib import closing, suppress

import pytest
import redis
from redis_server import RedisServer
from store_objects import Client, Prefix, runs_of, span_range
from tier_objects import put_bytes
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

MIB = 1 << 20
BASE = list(range(1000))
KV, HIDDEN, CHECKPOINT = Kind
STATE = (CHECKPOINT, 999, 1000)


def prefix_of(number: int) -> Prefix:
    """One prefix per purpose, in a namespace of its own."""
    return Prefix(number.to_bytes(32, "big"), BASE)


KEPT, NO_MANIFEST, BAD_MANIFEST, MOVED_MANIFEST, TRUNCATED, FLIPPED, SWAPPED, GONE, LATE = map(
    prefix_of, range(9)
)


def figures_of(span: tuple[Kind, int, int]) -> bytes:
    """Tail figures that name the page."""
    return span[2].to_bytes(6, "little") if span[0] is HIDDEN else b""


def settled(client: Client) -> bool:
    return client.stats().redis_pending_bytes == 0


def bytes_in(client: Client, tier: pb.Tier.ValueType) -> list[tuple[int, int, int]]:
    return [(t.kind, t.objects, t.bytes) for t in client.stats().tiers if t.tier == tier]


def payload_key(raw: redis.Redis, prefix: Prefix, kind: Kind, end: int) -> bytes:
    """The one key of an object's payload; IndexError when it is gone."""
    kind_and_hash = f"|{kind.name.lower()}@*@{prefix.name(kind, end).prefix_hash.hex()}"
    return raw.keys(f"tailreplay:o:{prefix.namespace.hex()}{kind_and_hash}")[0]


def manifest_key(prefix: Prefix, end: int) -> bytes:
    return b"tailreplay:m:" + prefix.namespace + prefix.chain.prefix_hash(end)


def damage(raw: redis.Redis) -> None:
    """Does to each prefix what its name says."""
    for key in raw.keys(b"tailreplay:m:" + NO_MANIFEST.namespace + b"*"):
        raw.delete(key)
    key = manifest_key(BAD_MANIFEST, 512)
    value = raw.hget(key, "k")
    raw.hset(key, "k", bytes([value[0] ^ 1]) + value[1:])
    raw.rename(manifest_key(MOVED_MANIFEST, 256), manifest_key(MOVED_MANIFEST, 257))
    for prefix, change in (
        (TRUNCATED, lambda value: value[:-1]),
        (FLIPPED, lambda value: value[:-1] + bytes([value[-1] ^ 1])),
        (SWAPPED, lambda value: raw.get(payload_key(raw, KEPT, KV, 512))),
    ):
        key = payload_key(raw, prefix, KV, 512)
        raw.set(key, change(raw.get(key)))
    raw.delete(payload_key(raw, GONE, KV, 512))


@pytest.fixture(scope="module")
def restarted():
    """A second store on the Redis of a first, where some of what it left was damaged meanwhile."""
    with closing(RedisServer()) as server, closing(redis.Redis.from_url(server.url)) as raw:
        settings = {"redis_url": server.url, "pool_bytes": 16 * MIB}
        with serve_in_thread(**settings) as first, closing(Client(first.address)) as client:
            for number in range(9):
                answer = client.put(prefix_of(number), figures=figures_of)
                assert (answer.stored, answer.dropped) == (21, 0)
            until(lambda: settled(client))
            assert bytes_in(client, pb.TIER_CPU) == bytes_in(client, pb.TIER_REDIS)
            boot_id = client.match(KEPT).boot_id
        damage(raw)
        with serve_in_thread(**settings) as second, closing(Client(second.address)) as client:
            assert client.match(KEPT).boot_id != boot_id
            yield second.store, client, raw


@pytest.fixture
def store(restarted):
    return restarted[0]


@pytest.fixture
def client(restarted):
    yield restarted[1]
    assert restarted[1].stats().pinned_bytes == 0
    assert restarted[1].stats().leases == 0


@pytest.fixture
def raw(restarted):
    return restarted[2]


def everything(prefix: Prefix) -> list[pb.Range]:
    state = span_range(*STATE, prefix_hash=prefix.chain.prefix_hash(1000))
    return [state, span_range(HIDDEN, 0, 1000), span_range(KV, 0, 1000)]


def test_hits_resume_after_a_restart_and_come_from_redis_once(client):
    found = client.match(KEPT)
    assert found.matched_tokens == 1000
    assert {run.tier for run in found.runs} == {pb.TIER_REDIS}
    assert [(c.token, c.tier) for c in found.checkpoints] == [(1000, pb.TIER_REDIS)]
    for tier in (pb.TIER_REDIS, pb.TIER_CPU):
        fetched = client.fetch(KEPT, *everything(KEPT))
        assert fetched.rows == {
            0: KEPT.rows(*STATE),
            1: KEPT.rows(HIDDEN, 0, 1000),
            2: KEPT.rows(KV, 0, 1000),
        }
        assert {frame.tier for frame in fetched.frames} == {tier}
    assert {run.tier for run in client.match(KEPT).runs} == {pb.TIER_CPU}


def test_tail_figures_outlive_a_restart(client):
    (hiddens,) = (run for run in client.match(KEPT).runs if run.kind == HIDDEN)
    assert hiddens.tail_figures == figures_of((HIDDEN, 960, 1000))


def test_a_sibling_matches_inside_a_restored_block(client):
    other = Prefix(KEPT.namespace, [*BASE[:700], 5_000_000])
    assert client.match(other).matched_tokens == 700
    assert client.fetch(other, span_range(KV, 0, 700)).rows == {0: other.rows(KV, 0, 700)}


def test_a_payload_without_its_manifest_does_not_exist(client):
    assert client.match(NO_MANIFEST).matched_tokens == 0


def test_a_damaged_manifest_field_is_a_miss_of_that_object_alone(client):
    found = client.match(BAD_MANIFEST)
    assert found.matched_tokens == 1000
    assert runs_of(found, KV) == [(0, 256), (512, 1000)]
    assert runs_of(found, HIDDEN) == [(0, 1000)]


def test_a_manifest_under_another_key_is_a_miss_with_all_that_follows_it(client):
    assert client.match(MOVED_MANIFEST).matched_tokens == 0


@pytest.mark.parametrize("prefix", [TRUNCATED, FLIPPED, SWAPPED], ids=["cut", "flipped", "swapped"])
def test_a_damaged_value_is_an_integrity_miss_counted_and_gone(client, raw, prefix):
    before = client.stats().integrity_errors
    fetched = client.fetch(prefix, span_range(KV, 0, 1000), span_range(HIDDEN, 0, 1000))
    assert fetched.missing[0] == pb.Missing(
        range=0, first_token=256, end_token=512, reason=pb.MISS_REASON_INTEGRITY
    )
    assert fetched.rows == {0: prefix.rows(KV, 0, 256), 1: prefix.rows(HIDDEN, 0, 1000)}
    assert client.stats().integrity_errors == before + 1
    assert runs_of(client.match(prefix), KV) == [(0, 256), (512, 1000)]
    with pytest.raises(IndexError):
        payload_key(raw, prefix, KV, 512)
    assert not raw.hexists(manifest_key(prefix, 512), "k")
    # What lies behind it is still right, and the hole can be filled.
    assert client.fetch(prefix, span_range(KV, 512, 1000)).rows == {0: prefix.rows(KV, 512, 1000)}
    assert client.put(prefix).stored == 1
    assert client.fetch(prefix, span_range(KV, 0, 1000)).rows == {0: prefix.rows(KV, 0, 1000)}
    until(lambda: settled(client))


def test_a_value_that_redis_has_dropped_is_an_evicted_miss(client, raw):
    before = client.stats().integrity_errors
    fetched = client.fetch(GONE, span_range(KV, 0, 1000))
    assert fetched.missing[0].reason == pb.MISS_REASON_EVICTED
    assert fetched.rows == {0: GONE.rows(KV, 0, 256)}
    assert client.stats().integrity_errors == before
    assert not raw.hexists(manifest_key(GONE, 512), "k")


def test_what_the_pool_gave_up_comes_back_from_redis(store, client):
    client.put(LATE)
    until(lambda: settled(client))
    store.catalog.room.make(store.tiers.pool_bytes)
    assert {run.tier for run in client.match(LATE).runs} == {pb.TIER_REDIS}
    fetched = client.fetch(LATE, *everything(LATE))
    assert not fetched.missing
    assert fetched.rows[2] == LATE.rows(KV, 0, 1000)


def test_a_pool_without_room_says_so_and_loses_nothing(store, client):
    client.put(LATE)
    until(lambda: settled(client))
    store.catalog.room.make(store.tiers.pool_bytes)
    filler = prefix_of(50).name(KV, 256)  # not in the catalog, so that nothing evicts it
    size = store.tiers.pool_bytes - store.tiers.used_bytes - 4096
    assert put_bytes(store.tiers, filler, bytes(size)) is None
    fetched = client.fetch(LATE, span_range(KV, 0, 1000))
    assert fetched.missing[0].reason == pb.MISS_REASON_NO_ROOM
    until(lambda: store.tiers.evict([filler]))
    assert client.fetch(LATE, span_range(KV, 0, 1000)).rows == {0: LATE.rows(KV, 0, 1000)}


def test_an_aborted_put_leaves_nothing_on_its_way(client):
    prefix = Prefix(os.urandom(32), BASE)
    with pytest.raises(Exception, match="DATA_LOSS"):
        client.put(prefix, [(KV, 0, 256)], make=lambda span: bytes(5000))
    assert settled(client)


def test_redis_may_die_come_late_and_freeze_and_the_store_lives_on(start_redis):
    server = start_redis(persistent=True)
    prefix, other = prefix_of(100), prefix_of(101)
    settings = {"pool_bytes": 4 * MIB, "redis_timeout_s": 1.0}
    with serve_in_thread(redis_url=server.url, **settings) as store:
        client = Client(store.address)
        client.put(prefix)
        until(lambda: settled(client))
        server.kill()
        # Without Redis objects live in the CPU tier alone, and nothing stays on its way.
        assert client.put(other).stored == 21
        until(lambda: settled(client))
        until(lambda: not client.stats().redis_healthy)
        assert client.fetch(other, span_range(KV, 0, 1000)).rows == {0: other.rows(KV, 0, 1000)}
        # What only Redis has is late, not lost.
        store.store.catalog.room.make(store.store.tiers.pool_bytes)
        assert client.match(other).matched_tokens == 0
        fetched = client.fetch(prefix, span_range(KV, 0, 1000))
        assert fetched.missing[0].reason == pb.MISS_REASON_DEADLINE
        server.start()
        until(lambda: client.stats().redis_healthy)
        assert client.fetch(prefix, span_range(KV, 0, 1000)).rows == {0: prefix.rows(KV, 0, 1000)}
        client.close()
    server.kill()
    with serve_in_thread(redis_url=server.url, **settings) as store:
        client = Client(store.address)
        assert client.match(prefix).matched_tokens == 0
        server.start()  # after the store: its hits come with it
        until(lambda: client.match(prefix).matched_tokens == 1000)
        # A freeze is waited for, and what was put meanwhile gets there or is given up.
        server.pause()
        assert client.put(other, other.spans(KV)).stored == 4
        assert not settled(client)
        server.resume()
        until(lambda: settled(client))
        client.close()


@pytest.mark.parametrize("lanes", [0, 4], ids=["grpc", "lane"])
def test_a_reader_that_leaves_while_redis_is_silent_leaves_no_lease(redis_server, lanes):
    prefix = prefix_of(102)
    settings = {"pool_bytes": 4 * MIB, "redis_patience_s": 60.0, "tier_timeout_s": 60.0}
    with serve_in_thread(redis_url=redis_server.url, max_lanes=lanes, **settings) as store:
        with closing(Client(store.address)) as client:
            client.put(prefix)
            until(lambda: settled(client))
        store.store.catalog.room.make(4 * MIB)
        with StoreClient(store.address, match_timeout_s=20) as client:
            leaf = client.match(prefix.namespace, prefix.tokens).leaf
            stream = client.fetch(prefix.namespace, leaf, [span_range(KV, 0, 1000)], timeout_s=60)

            def read() -> None:
                with suppress(TailReplayError):
                    list(stream)

            redis_server.pause()
            try:
                reading = threading.Thread(target=read, daemon=True)
                reading.start()
                until(lambda: store.store.stats().leases == 1)
                stream.cancel()
                until(lambda: store.store.stats().leases == 0, limit_s=10)
            finally:
                redis_server.resume()
            reading.join(20)
