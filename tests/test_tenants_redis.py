"""Tenants stay apart in Redis, over restarts, and between stores that share it."""

from contextlib import closing, contextmanager

import lane_objects
import pytest
import redis
from lane_objects import WAIT_S
from store_objects import Prefix, span_range
from tokens_file import TENANTS, bearer, operating, write_tokens
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.ledger import Ledger
from tailreplay.store.manifest_seal import MARKS, Encrypted
from tailreplay.store.objects import Kind
from tailreplay.store.public_prefixes import PublicPrefix
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_servers import RedisServers
from tailreplay.store.redis_tables import RedisTables
from tailreplay.store.sealing import SealingKeys
from tailreplay.store.tokens import to_wire

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


def test_a_restart_and_a_second_store_find_the_same_for_the_same_tenants(
    world, redis_server, tmp_path
):
    with world() as (first, clients):
        lane_objects.put(clients["root"], SYSTEM)
        lane_objects.put(clients["acme"], MINE)
        with operating(first, tmp_path) as admin:
            admin.AddPublic(
                pb.AddPublicRequest(namespace=SPACE, tokens=to_wire(SYSTEM.tokens)), timeout=WAIT_S
            )
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


def test_a_closed_prefix_is_gone_from_redis_and_for_every_store(world, redis_server, tmp_path):
    other = Prefix(SPACE, [*SYSTEM.ids[:300], *range(9000, 9300)])
    with world() as (first, clients), world() as (second, others):
        for prefix in (SYSTEM, other):
            lane_objects.put(clients["root"], prefix)
            with operating(first, tmp_path) as admin:
                request = pb.AddPublicRequest(namespace=SPACE, tokens=to_wire(prefix.tokens))
                admin.AddPublic(request, timeout=WAIT_S)
        until(lambda: not first.store.stats().redis_pending_bytes)
        until(lambda: matched(others["acme"], SYSTEM) == matched(others["acme"], other) == 512)
        with operating(second, tmp_path) as admin:  # which has read and registered none of it
            listed = admin.ListPublic(pb.ListPublicRequest(), timeout=WAIT_S).prefixes
            assert [p.prefix_hash for p in listed] == [
                prefix.chain.prefix_hash(512) for prefix in (SYSTEM, other)
            ]
            request = pb.RemovePublicRequest(prefix_hash=SYSTEM.chain.prefix_hash(512))
            gone = admin.RemovePublic(request, timeout=WAIT_S)
        assert (gone.has_redis, gone.kept_tokens) == (True, 256)
        assert (gone.redis_keys_left, gone.cpu_objects_left) == (0, 0)
        assert gone.redis_keys_deleted > 0
        until(lambda: matched(clients["acme"], SYSTEM) == 256)
        assert matched(clients["acme"], other) == matched(others["rival"], other) == 512
        rows, _ = lane_objects.fetch(others["rival"], other, WHOLE)
        assert rows == [other.rows(Kind.KV, 0, 512)]
        names = [SYSTEM.chain.prefix_hash(end) for end in range(320, 701, 64)]
        assert not keys_named(redis_server, names)
        # The store that was told has taken them out of its own pool.
        assert (gone.stores, gone.silent_stores) == (1, 0)
        assert matched(clients["root"], SYSTEM) == matched(others["root"], SYSTEM) == 300
    with world() as (_, again):
        assert matched(again["rival"], SYSTEM) == 256
        assert matched(again["rival"], other) == 512


def keys_named(redis_server, names):
    with redis.Redis.from_url(redis_server.url) as values:
        return [
            key
            for key in values.scan_iter(count=1000)
            if any(name in key or name.hex().encode() in key for name in names)
        ]


def prefix_named(fill: bytes, blocks: int = 3) -> PublicPrefix:
    return PublicPrefix(b"s" * 32, tuple(bytes([at]) + fill * 31 for at in range(blocks)), 1.5)


@pytest.mark.parametrize("seal", [MARKS, Encrypted(SealingKeys([b"k" * 32]))], ids=["plain", "aes"])
def test_a_public_prefix_that_is_damaged_in_redis_is_not_public(redis_server, seal):
    servers = RedisServers([RedisEndpoint.parse(redis_server.url)], timeout_s=5)
    with (
        closing(RedisTables(servers, "t:", seal)) as tables,
        redis.Redis.from_url(redis_server.url) as raw,
    ):
        ledger = Ledger(tables)
        one, other, third = (prefix_named(fill) for fill in (b"a", b"b", b"c"))
        for prefix in (one, other, third):
            ledger.publish(prefix)
        assert ledger.published({}) == {p.prefix_hash: p for p in (one, other, third)}
        # Blocks of another, blocks that are gone, and the entry of another: none of them counts.
        keys = [b"t:a:public:" + prefix.prefix_hash for prefix in (one, other, third)]
        raw.set(keys[0], raw.get(keys[1]))
        assert set(ledger.published({})) == {other.prefix_hash, third.prefix_hash}
        raw.delete(keys[1])
        assert set(ledger.published({})) == {third.prefix_hash}
        raw.hset("t:a:public", third.prefix_hash, raw.hget("t:a:public", one.prefix_hash))
        assert ledger.published({}) == {}
        ledger.unpublish(third.prefix_hash)
        assert not raw.exists(keys[2])


def test_what_is_flushed_from_redis_is_public_no_more(world, redis_server, tmp_path):
    with world() as (store, clients):
        lane_objects.put(clients["root"], SYSTEM)
        with operating(store, tmp_path) as admin:
            request = pb.AddPublicRequest(namespace=SPACE, tokens=to_wire(SYSTEM.tokens))
            admin.AddPublic(request, timeout=WAIT_S)
            assert matched(clients["acme"], SYSTEM) == 512
            with redis.Redis.from_url(redis_server.url) as raw:
                raw.flushall()
            until(lambda: matched(clients["acme"], SYSTEM) == 0)
            admin.AddPublic(request, timeout=WAIT_S)
            assert matched(clients["acme"], SYSTEM) == 512
