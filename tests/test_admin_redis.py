"""What operators do where there is a real Redis: it outlives the store, and forgets when told."""

import os
import threading
from contextlib import closing

import grpc
import pytest
import redis
from store_objects import GEOMETRY, Client, Prefix, put_frames, runs_of, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.geometry import Dtype, kv_geometry
from tailreplay.store.header import object_bytes
from tailreplay.store.ledger import Ledger
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_servers import RedisServers
from tailreplay.store.redis_tables import RedisTables
from tailreplay.store.server import StoreServer
from tailreplay.store.tokens import to_wire

pytestmark = pytest.mark.redis

MIB = 1 << 20
KV, HIDDEN, CHECKPOINT = Kind
BLOCK = object_bytes(GEOMETRY[KV], 256)
ACME, OTHER = tenant_digest("acme"), tenant_digest("other")


def prefix_of(tenant: bytes, ids=range(1000)) -> Prefix:
    return Prefix(os.urandom(32), ids, tenant=tenant)


def info(client: Client, tenant: bytes) -> pb.TenantInfo:
    return client.admin.ListTenants(pb.ListTenantsRequest(tenant=tenant), timeout=20).tenants[0]


def in_redis_alone(server: StoreServer, client: Client) -> Prefix:
    """A prefix that is stored, and evicted from memory."""
    prefix = prefix_of(ACME)
    client.put(prefix)
    settle(client)
    server.store.catalog.room.make(server.store.tiers.pool_bytes)
    return prefix


def pin(client: Client, prefix: Prefix) -> pb.PinInfo:
    request = pb.PinRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens), seconds=60)
    return client.admin.Pin(request, timeout=20)


def owner_is_written(raw: redis.Redis, prefix: Prefix) -> bool:
    return bool(raw.exists(b"tailreplay:a:owner:" + prefix.namespace))


def settle(client: Client) -> None:
    until(lambda: not client.stats().redis_pending_bytes)


@pytest.fixture
def running(redis_server):
    """Starts stores on one Redis."""
    with closing(redis.Redis.from_url(redis_server.url)) as raw:
        yield redis_server, raw


def test_use_limits_and_modes_are_true_after_a_restart(running):
    server, raw = running
    prefixes = [prefix_of(ACME), prefix_of(ACME), prefix_of(OTHER)]
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        for prefix in prefixes:
            client.put(prefix)
        client.admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, redis_bytes=100 * MIB))
        client.admin.SetMode(pb.SetModeRequest(tenant=OTHER, mode="auto"))
        settle(client)
        before = info(client, ACME)
        assert before.redis_bytes == before.cpu_bytes > 0
        until(lambda: all(owner_is_written(raw, prefix) for prefix in prefixes))
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        until(lambda: info(client, ACME).HasField("redis_limit_bytes"))
        after = info(client, ACME)
        assert (after.redis_bytes, after.cpu_bytes) == (before.redis_bytes, 0)
        assert after.namespaces == 2
        assert after.redis_limit_bytes == 100 * MIB
        assert client.match(prefixes[2]).default_mode == "auto"
        assert client.match(prefixes[0]).default_mode == ""
        # A limit that another process has set holds for what was there before.
        client.admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, redis_bytes=before.redis_bytes // 2))
        assert 0 < info(client, ACME).redis_bytes <= before.redis_bytes // 2
        assert info(client, OTHER).redis_bytes == before.redis_bytes // 2


def test_a_limit_in_redis_takes_a_tenants_oldest_payload_there_and_leaves_the_pool(running):
    server, raw = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        old, new, other = prefix_of(ACME), prefix_of(ACME), prefix_of(OTHER)
        for prefix in (old, new, other):
            client.put(prefix, prefix.spans(KV))
            settle(client)
        client.admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, redis_bytes=4 * BLOCK))
        assert info(client, ACME).redis_bytes <= 4 * BLOCK
        assert info(client, ACME).evicted_bytes >= 3 * BLOCK
        assert len(raw.keys(f"tailreplay:o:{old.namespace.hex()}|*")) == 0
        assert len(raw.keys(f"tailreplay:o:{new.namespace.hex()}|*")) == 4
        assert len(raw.keys(f"tailreplay:o:{other.namespace.hex()}|*")) == 4
        assert runs_of(client.match(old), KV) == [(0, 1000)]
        another = prefix_of(ACME)
        client.put(another, another.spans(KV))
        settle(client)
        until(lambda: info(client, ACME).redis_bytes <= 4 * BLOCK)


def test_erasing_a_tenant_leaves_no_key_and_a_scan_of_ones_own_agrees(running):
    server, raw = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        mine, twin, other = prefix_of(ACME), prefix_of(ACME), prefix_of(OTHER)
        # A namespace may hold what a pattern of Redis takes for something else.
        mine.namespace = b"*?[a-z]\\^" + mine.namespace[9:]
        mine = Prefix(mine.namespace, mine.ids, tenant=ACME)
        for prefix in (mine, twin, other):
            assert client.put(prefix).stored == 21
        settle(client)
        until(lambda: all(owner_is_written(raw, p) for p in (mine, twin, other)))
        keys = [key for key in raw.keys("*") if mine.namespace in key or b"|" in key]
        assert keys
        answer = client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
        assert answer.has_redis
        assert (answer.namespaces, answer.cpu_objects_left, answer.redis_keys_left) == (2, 0, 0)
        assert {(t.tier, t.kind): t.objects for t in answer.removed} == {
            (tier, kind): 2 * n
            for tier in (pb.TIER_CPU, pb.TIER_REDIS)
            for kind, n in ((pb.KIND_KV, 4), (pb.KIND_HIDDEN, 16), (pb.KIND_CHECKPOINT, 1))
        }
        for prefix in (mine, twin):
            marks = (prefix.namespace, prefix.namespace.hex().encode())
            assert not [key for key in raw.keys("*") if any(mark in key for mark in marks)]
            assert not owner_is_written(raw, prefix)
            assert client.match(prefix).matched_tokens == 0
        assert owner_is_written(raw, other)
        assert client.match(other).matched_tokens == 1000
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        assert [client.match(p).matched_tokens for p in (mine, twin, other)] == [0, 0, 1000]


def test_what_another_store_has_written_is_erased_too(running):
    server, raw = running
    with (
        serve_in_thread(redis_url=server.url) as first,
        serve_in_thread(redis_url=server.url) as second,
        closing(Client(first.address)) as writer,
        closing(Client(second.address)) as client,
    ):
        prefix = prefix_of(ACME)
        writer.put(prefix)
        settle(writer)
        until(lambda: owner_is_written(raw, prefix))
        answer = client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
        assert (answer.namespaces, answer.redis_keys_left) == (1, 0)
        assert answer.redis_keys_deleted > 21
        assert not [key for key in raw.keys("*") if prefix.namespace in key]


def test_whose_a_namespace_is_may_be_said_after_another_store_has_read_of_it(running):
    """Else what it had read was nobody's for good, and erasing the tenant there left it."""
    server, raw = running
    servers = RedisServers([RedisEndpoint.parse(server.url)], timeout_s=5)
    prefix = prefix_of(ACME)
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as writer:
        writer.put(prefix)
        settle(writer)
        until(lambda: owner_is_written(raw, prefix))
    raw.delete(*raw.keys("tailreplay:a:owner:*"))  # as before it was written
    with (
        serve_in_thread(redis_url=server.url) as store,
        closing(Client(store.address)) as reader,
        closing(RedisTables(servers, "tailreplay:")) as tables,
    ):
        ledger = Ledger(tables)
        assert reader.fetch(prefix, span_range(KV, 0, 1000)).ended == [0]
        until(lambda: store.store.catalog.quotas.tenants() == [b""])
        ledger.own({prefix.namespace: ACME})
        until(lambda: info(reader, ACME).namespaces == 1)
        ledger.disown([prefix.namespace])  # as erasing it through another store does
        answer = reader.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
        assert (answer.namespaces, answer.cpu_objects_left, answer.redis_keys_left) == (1, 0, 0)
        assert answer.overwritten_bytes > 3 * BLOCK
        assert reader.match(prefix).matched_tokens == 0


def test_whose_a_namespace_is_is_written_again_if_it_was_erased_while_it_was_written(running):
    server, raw = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        operators, prefix, erased = store.store.admin.operators, prefix_of(ACME), threading.Event()
        own = operators._ledger.own

        def owned(owners) -> None:
            own(owners)
            if prefix.namespace in owners and not erased.is_set():
                operators.disown([prefix.namespace])
                erased.set()

        operators._ledger.own = owned
        client.put(prefix)
        assert erased.wait(20)
        client.put(prefix)
        until(lambda: owner_is_written(raw, prefix))


def test_without_redis_there_is_no_proof_and_the_pool_is_cleared(running):
    server, raw = running
    with (
        serve_in_thread(redis_url=server.url, redis_timeout_s=0.5) as store,
        closing(Client(store.address)) as client,
    ):
        prefix = prefix_of(ACME)
        client.put(prefix)
        settle(client)
        until(lambda: owner_is_written(raw, prefix))
        server.kill()
        with pytest.raises(grpc.RpcError) as caught:
            client.admin.Clear(pb.ClearRequest(tenant=ACME), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the CPU tier was cleared, Redis was not" in caught.value.details()
        assert client.match(prefix).matched_tokens == 0
        with pytest.raises(grpc.RpcError) as caught:
            client.admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, cpu_bytes=1), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not info(client, ACME).HasField("cpu_limit_bytes")


def test_a_pin_brings_what_is_in_redis_alone(running):
    server, _ = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        prefix = in_redis_alone(store, client)
        assert {r.tier for r in client.match(prefix).runs} == {pb.TIER_REDIS}
        made = pin(client, prefix)
        assert (made.objects, made.left_out_bytes) == (21, 0)
        assert {r.tier for r in client.match(prefix).runs} == {pb.TIER_CPU}
        store.store.catalog.room.make(store.store.tiers.pool_bytes)
        assert {r.tier for r in client.match(prefix).runs} == {pb.TIER_CPU}


def test_a_pin_holds_only_what_comes(running):
    server, raw = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        prefix = in_redis_alone(store, client)
        raw.delete(*raw.keys(f"tailreplay:o:{prefix.namespace.hex()}|checkpoint@*"))
        made = pin(client, prefix)
        assert (made.objects, made.left_out_bytes) == (20, object_bytes(GEOMETRY[CHECKPOINT], 1))
        assert not [c for c in client.match(prefix).checkpoints if c.tier == pb.TIER_CPU]


def test_what_is_erased_between_a_lookup_and_its_load_is_served_to_nobody(running):
    server, _ = running
    with serve_in_thread(redis_url=server.url) as serving, closing(Client(serving.address)) as one:
        prefix, store = in_redis_alone(serving, one), serving.store
        pin_there = store.tiers.pin

        def pinned(*wanted, **how):
            store.tiers.pin = pin_there
            store.admin._eraser.drop({prefix.namespace})  # Redis has it yet
            return pin_there(*wanted, **how)

        store.tiers.pin = pinned
        fetched = one.fetch(prefix, span_range(KV, 0, 1000))
        assert not fetched.frames
        assert fetched.missing[0].reason == pb.MISS_REASON_EVICTED
        until(lambda: not store.tiers.used_bytes)
        assert not store.catalog.select(lambda _: True)


def test_what_is_erased_while_a_pin_loads_it_does_not_stay_in_the_pool(running):
    server, _ = running
    with serve_in_thread(redis_url=server.url) as serving, closing(Client(serving.address)) as one:
        prefix, store = in_redis_alone(serving, one), serving.store
        pin_there = store.tiers.pin

        def pinned(*wanted, **how):
            store.tiers.pin = pin_there
            came = pin_there(*wanted, **how)
            store.catalog.lost(*store.catalog.select(lambda _: True))  # as an erasure does first
            return came

        store.tiers.pin = pinned
        assert pin(one, prefix).objects == 0
        assert store.tiers.used_bytes == 0


def test_a_stalled_reader_is_cut_off_while_redis_is_frozen(running, clock):
    """What waits for Redis again and again must not delay the end of leases."""
    server, _ = running
    wide = {KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=256, dtype=Dtype.FLOAT32)}
    prefix = Prefix(os.urandom(32), range(256 * 6), wide)  # far more than a connection buffers
    with (
        serve_in_thread(redis_url=server.url, redis_timeout_s=30, clock=clock) as store,
        closing(Client(store.address)) as client,
    ):
        client.put(prefix, prefix.spans(KV))
        settle(client)
        server.pause()
        try:
            stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
            next(stream)
            until(lambda: len(store.store.leases) == 1)
            until(lambda: clock.step(60) or not len(store.store.leases), limit_s=15)
            stream.cancel()
        finally:
            server.resume()


def test_owners_are_remembered_for_three_days_of_redis(running):
    server, raw = running
    day_ms = 24 * 3600 * 1000
    servers = RedisServers([RedisEndpoint.parse(server.url)], timeout_s=5)
    with closing(RedisTables(servers, "t:")) as tables:
        ledger = Ledger(tables)
        old, new = os.urandom(32), b"*?[a]\\" + os.urandom(26)
        ledger.own({old: ACME, new: ACME})
        ledger.own({})
        assert ledger.owners_of([old, new, os.urandom(32)]) == {old: ACME, new: ACME}
        assert ledger.namespaces_of(ACME) == {old, new}
        assert 2.9 * day_ms < raw.pttl(b"t:a:owner:" + old) <= 3 * day_ms
        raw.delete(b"t:a:owner:" + old)  # as it ends
        assert ledger.owners_of([old, new]) == {new: ACME}
        assert ledger.namespaces_of(ACME) == {new}
        ledger.disown([new])
        assert ledger.owners_of([new]) == {}
        raw.set(b"t:a:owner:" + new, ACME + bytes(8))  # with another's mark
        assert ledger.owners_of([new]) == {}
        assert ledger.namespaces_of(ACME) == set()


def test_whose_a_namespace_is_and_what_it_is_called_is_said_again_each_day(
    running, clock, tmp_path
):
    server, raw = running
    day_s, prefix = 24 * 3600, prefix_of(ACME)
    keys = [b"tailreplay:a:" + what + prefix.namespace for what in (b"owner:", b"name:")]
    config = StoreConfig(
        listen=f"unix://{tmp_path}/s.sock", pool_bytes=8 * MIB, redis_url=server.url
    )

    def is_said() -> bool:
        clock.now_s += 1
        return all(raw.pttl(key) > 2 * day_s * 1000 for key in keys)

    with closing(Store(config, clock=clock)) as store:
        store.put(put_frames(prefix), lambda: None)
        store.client_names.note(prefix.namespace, b"s" * 32)
        until(is_said)
        for key in keys:
            raw.pexpire(key, day_s * 1000)
        clock.now_s += day_s
        until(is_said)


def test_whose_a_namespace_is_is_said_before_a_store_ends(running, clock, tmp_path):
    """It was said each second, so who put and stopped at once left what nobody could erase."""
    server, raw = running
    prefix = prefix_of(ACME)
    config = StoreConfig(
        listen=f"unix://{tmp_path}/s.sock", pool_bytes=8 * MIB, redis_url=server.url
    )
    with closing(Store(config, clock=clock)) as store:
        store.admin.operators.tick()  # the last one, since the clock stands
        store.put(put_frames(prefix), lambda: None)
        assert not owner_is_written(raw, prefix)
    assert owner_is_written(raw, prefix)


def test_erasing_and_limits_reach_every_server(start_redis):
    servers = [start_redis(), start_redis()]
    url = " ".join(server.url for server in servers)
    with serve_in_thread(redis_url=url) as store, closing(Client(store.address)) as client:
        mine, other = prefix_of(ACME), prefix_of(OTHER)
        client.put(other)
        for first in range(16):  # segments enough for both
            client.put(Prefix(mine.namespace, range(first, first + 300), tenant=ACME))
        settle(client)
        raws = [redis.Redis.from_url(server.url) for server in servers]
        marks = (mine.namespace, mine.namespace.hex().encode())
        assert all(any(mark in key for key in raw.scan_iter() for mark in marks) for raw in raws)
        client.admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, redis_bytes=0), timeout=20)
        payloads = f"tailreplay:o:{mine.namespace.hex()}|*"
        assert [raw.keys(payloads) for raw in raws] == [[], []]
        assert info(client, ACME).redis_bytes == 0
        answer = client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
        assert (answer.cpu_objects_left, answer.redis_keys_left) == (0, 0)
        assert answer.redis_keys_deleted > 0
        left = [
            key for raw in raws for key in raw.scan_iter() if any(mark in key for mark in marks)
        ]
        assert left == []
        assert client.match(other).matched_tokens == 1000
        for raw in raws:
            raw.close()


def test_what_is_on_its_way_to_redis_when_it_is_erased_does_not_arrive(running):
    server, raw = running
    with serve_in_thread(redis_url=server.url) as store, closing(Client(store.address)) as client:
        for _ in range(10):
            prefix = prefix_of(ACME, range(10_000))
            client.put(prefix)
            answer = client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
            assert (answer.held_objects, answer.redis_keys_left) == (0, 0)
            settle(client)
            marks = (prefix.namespace, prefix.namespace.hex().encode())
            found = [key for key in raw.scan_iter() if any(mark in key for mark in marks)]
            assert found == []
            assert client.match(prefix).matched_tokens == 0
