"""Room for what is put while all that could go is on its way to Redis."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from redis_server import RedisServer, servers_at
from store_objects import GEOMETRY, Client, Prefix, put_frames, span_range
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.backlog import Backlog
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.header import object_bytes
from tailreplay.store.holdings import Holdings
from tailreplay.store.manifest import Manifests
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind
from tailreplay.store.quota import Limits
from tailreplay.store.room import Room
from tailreplay.store.writer import Writer

MIB = 1 << 20
POOL_BYTES = 8 * MIB
KV = Kind.KV
BLOCKS = 40
PUT_BYTES = BLOCKS * object_bytes(GEOMETRY[KV], 256)
PATIENCE_S = 0.3


def prefixes(count: int) -> list[Prefix]:
    """Prompts of 40 blocks that share nothing, each of its own namespace."""
    return [Prefix(i.to_bytes(32, "big"), range(BLOCKS * 256)) for i in range(count)]


TWICE_THE_POOL = 2 * POOL_BYTES // PUT_BYTES + 1


@contextmanager
def served(redis: RedisServer, **settings: float):
    with (
        serve_in_thread(
            redis_url=redis.url, redis_timeout_s=60, pool_bytes=POOL_BYTES, **settings
        ) as server,
        closing(Client(server.address)) as client,
    ):
        try:
            yield server.store, client
        finally:
            redis.resume()  # or what closes would wait for it


def dropped(client: Client, some: list[Prefix]) -> int:
    return sum(client.put(prefix, prefix.spans(KV)).dropped for prefix in some)


def given_up(store) -> int:
    return store.catalog.figures().get("write_backlog", 0)


def drained(store, client: Client) -> None:
    """Everything gets to Redis or not, and nothing stays locked in the pool."""
    until(lambda: not client.stats().redis_pending_bytes)
    until(lambda: (store.catalog.room.make(POOL_BYTES), store.tiers.used_bytes)[1] == 0)
    assert store.tiers.pinned_bytes == 0
    assert store.catalog.backlog.waiting == 0


@pytest.mark.redis
def test_a_put_waits_until_redis_goes_on_and_all_of_a_burst_gets_there(redis_server):
    with served(redis_server, put_patience_s=20) as (store, client), ThreadPoolExecutor(1) as pool:
        burst = prefixes(TWICE_THE_POOL)
        redis_server.pause()
        client.put(burst[0], burst[0].spans(KV))
        writer = pool.submit(dropped, client, burst[1:])
        until(lambda: store.catalog.backlog.waiting)
        with closing(Client(store.config.listen)) as reader:  # which waits for nobody
            assert reader.match(burst[0]).matched_tokens == len(burst[0])
            got = reader.fetch(burst[0], span_range(KV, 0, len(burst[0])))
        assert got.rows[0] == burst[0].rows(KV, 0, len(burst[0]))
        assert store.catalog.backlog.waiting
        redis_server.resume()
        assert writer.result(60) == 0
        until(lambda: not client.stats().redis_pending_bytes)
        assert given_up(store) == 0
        assert [client.match(one).matched_tokens for one in burst] == [len(burst[0])] * len(burst)
        drained(store, client)


@pytest.mark.redis
def test_a_frozen_redis_holds_no_put_up_for_long_and_the_newest_prompts_stay(redis_server):
    with served(redis_server, put_patience_s=PATIENCE_S) as (store, client):
        burst = prefixes(TWICE_THE_POOL)
        redis_server.pause()
        assert dropped(client, burst) == 0  # each within its deadline, which is a third of Redis'
        newest = burst[-TWICE_THE_POOL // 4 :]
        found = [client.match(one).matched_tokens for one in newest]
        assert found == [len(burst[0])] * len(newest)
        assert given_up(store) > BLOCKS
        redis_server.resume()
        drained(store, client)


@pytest.mark.redis
def test_who_waits_for_nobody_gives_the_oldest_up_at_once(redis_server):
    with served(redis_server, put_patience_s=0) as (store, client):
        redis_server.pause()
        burst = prefixes(TWICE_THE_POOL)
        assert dropped(client, burst) == 0
        assert given_up(store) > 0
        redis_server.resume()
        drained(store, client)
        assert client.match(burst[-1]).matched_tokens == len(burst[-1])  # it is in Redis


@pytest.mark.redis
def test_writers_who_wait_together_all_get_room(redis_server):
    with served(redis_server, put_patience_s=PATIENCE_S) as (store, client):
        redis_server.pause()
        burst = prefixes(2 * TWICE_THE_POOL)

        def write(first: int) -> int:
            with closing(Client(store.config.listen)) as own:
                return dropped(own, burst[first::4])

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(write, range(4))) == [0] * 4
        redis_server.resume()
        drained(store, client)


@pytest.mark.redis
def test_what_a_tenants_limit_makes_go_may_be_on_its_way_too(redis_server):
    with served(redis_server, put_patience_s=PATIENCE_S) as (store, client):
        tenant, (old, new) = tenant_digest("ours"), prefixes(2)
        store.catalog.limit(tenant, Limits(cpu_bytes=PUT_BYTES + PUT_BYTES // 2))
        redis_server.pause()
        for prefix in (old, new):
            store.catalog.quotas.own(prefix.namespace, tenant)
            assert client.put(prefix, prefix.spans(KV)).dropped == 0
        assert client.match(new).matched_tokens == len(new)
        assert store.catalog.quotas.bytes_of(tenant, "cpu") <= PUT_BYTES + PUT_BYTES // 2
        redis_server.resume()
        drained(store, client)


@pytest.mark.redis
def test_nobody_waits_and_nothing_is_given_up_for_what_can_have_no_room(redis_server):
    with served(redis_server, put_patience_s=60) as (store, client), ThreadPoolExecutor(1) as pool:
        backlog, tenant, (old, new) = store.catalog.backlog, tenant_digest("ours"), prefixes(2)
        redis_server.pause()
        client.put(old, old.spans(KV))

        def waits(size: int, whose: bytes | None) -> bool:
            asked = pool.submit(backlog.make_room, size, whose)
            until(lambda: asked.done() or backlog.waiting)
            return backlog.waiting > 0 or asked.result(60)

        assert not waits(POOL_BYTES + 1, None)
        store.catalog.limit(tenant, Limits(cpu_bytes=0))
        store.catalog.quotas.own(new.namespace, tenant)
        assert not waits(MIB, tenant)
        assert given_up(store) == 0
        redis_server.resume()
        drained(store, client)


def test_nobody_waits_for_a_redis_that_has_taken_nothing_for_the_time_of_one_wait():
    now_s = 0.0
    manifests = Manifests(servers_at("unix:///nowhere/redis.sock"), "t:", 60.0)
    with serve_in_thread(pool_bytes=POOL_BYTES) as server, ThreadPoolExecutor(1) as pool:
        tiers, (prefix,) = server.store.tiers, prefixes(1)
        catalog = Catalog(manifests, clock=lambda: now_s, patience_s=1000.0)
        catalog.attach(tiers)  # which has no Redis, so that nothing ever arrives there
        writer = Writer(catalog, tiers, digest_key=digest_key, max_object_bytes=MIB)
        frames = put_frames(prefix, prefix.spans(KV))
        assert writer.put(frames, lambda begin: begin.namespace).stored == BLOCKS
        backlog = catalog.backlog

        def waits(limit_s: float) -> bool:
            """Whether somebody waits, until the clock says that it was long enough."""
            nonlocal now_s
            asked = pool.submit(backlog.make_room, POOL_BYTES // 32)
            until(lambda: asked.done() or backlog.waiting)
            has_waited = not asked.done()
            now_s += limit_s
            backlog.note_move()
            assert asked.result(20)
            return has_waited

        assert waits(1000)
        assert not waits(0)
        backlog.note_taken()
        assert waits(1000)
        assert catalog.figures()["write_backlog"] >= 3
        assert not backlog.make_room(POOL_BYTES + 1)
    manifests.close()


class NoRoom(Room):
    """Never has any, looks for 20 ms each time, and something moves meanwhile."""

    def __init__(self) -> None:
        self.backlog: Backlog | None = None
        self.now_s, self.looks = 0.0, 0

    def make(self, size: int, tenant: bytes | None = None) -> bool:
        self.now_s, self.looks = self.now_s + 0.02, self.looks + 1
        assert self.looks < 200
        self.backlog.note_move()
        return False


def test_a_wait_ends_though_something_moves_all_the_time_that_makes_no_room():
    with serve_in_thread(pool_bytes=POOL_BYTES) as server:
        room = NoRoom()
        backlog = room.backlog = Backlog(Holdings(to_redis=True), room, 0.5, lambda: room.now_s)
        backlog.attach(server.store.tiers)
        assert not backlog.make_room(MIB)
        assert room.looks == pytest.approx(26, abs=2)
        assert backlog.waiting == 0
