"""Damage done in the pool: readers see it, the store is told, looks for itself and lets it go."""

import logging
import threading
from concurrent import futures
from contextlib import closing, contextmanager

import grpc
import lane_objects
import pytest
import redis
from lane_objects import WAIT_S
from store_objects import GEOMETRY, Prefix, put_frames, runs_of, span_range
from tokens_file import TENANTS, bearer, operating, write_tokens
from waiting import Clock, until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.load import Load, LoadFailed
from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import serve_in_thread
from tailreplay.store.auth import Access, Principal, Role
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.geometry import Dtype, checkpoint_geometry, hidden_geometry, kv_geometry
from tailreplay.store.header import object_bytes
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.redis_envelope import Plain
from tailreplay.store.service import StoreService
from tailreplay.store.tokens import to_wire

MIB = 1 << 20
KV, HIDDEN, CHECKPOINT = Kind
TOKENS = 512

WIDE = {
    KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=32, dtype=Dtype.FLOAT32),
    HIDDEN: hidden_geometry(sources=2, hidden_size=64, dtype=Dtype.FLOAT32),
    CHECKPOINT: checkpoint_geometry(
        shape=(3, 2, 1, 64, 64, 3), dtype=Dtype.FLOAT32, state_dtype=Dtype.FLOAT32
    ),
}
"""Pages of 16 KiB and more: their checksums are those that engines computed."""

PREFIX = Prefix(bytes(32), range(TOKENS), GEOMETRY | WIDE)
STATE = PREFIX.chain.prefix_hash(TOKENS)
RANGES = {
    KV: span_range(KV, 0, TOKENS),
    HIDDEN: span_range(HIDDEN, 0, TOKENS),
    CHECKPOINT: span_range(CHECKPOINT, TOKENS - 1, TOKENS, prefix_hash=STATE),
}
ROWS = {KV: 256, HIDDEN: 64, CHECKPOINT: 1}


def spoil(store: Store, name, kind: Kind, back: int = 100) -> None:
    """Flips a bit of an object in the pool, so many bytes before its end."""
    size = object_bytes(WIDE[kind], ROWS[kind])
    (pinned,) = store.tiers.pin([(name, size)], urgent=True, timeout_s=WAIT_S)
    with open(store.tiers.shm_path, "r+b") as pool:
        pool.seek(pinned.pool_offset + size - back)
        (byte,) = pool.read(1)
        pool.seek(-1, 1)
        pool.write(bytes([byte ^ 8]))
    store.tiers.unpin(pinned)


def load(client: StoreClient, wanted: pb.Range, prefix: Prefix = PREFIX):
    """Fetches a range as an engine does; its bytes, or why they are not to be had."""
    found = client.match(prefix.namespace, prefix.tokens, timeout_s=WAIT_S)
    load = Load(
        [wanted], WIDE, prefix.chain, stall_timeout_s=WAIT_S, on_event=lambda name, wanted: None
    )
    load.run(client.fetch(prefix.namespace, found.leaf, [wanted], timeout_s=WAIT_S))
    try:
        return load.wait(0).tobytes()
    except LoadFailed as failure:
        return failure.reason


def rows_of(wanted: pb.Range, prefix: Prefix = PREFIX) -> bytes:
    return lane_objects.rows_of(prefix, wanted)


def counts(store: Store) -> tuple[int, int, int]:
    stats = store.stats()
    return stats.damage_reports, stats.unfounded_damage_reports, stats.integrity_errors


@contextmanager
def serving(lanes: bool = True, **settings):
    settings = {"listen": "127.0.0.1:0", "pool_bytes": 16 * MIB} | settings
    with (
        serve_in_thread(**settings) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S, lanes=lanes) as client,
    ):
        assert lane_objects.put(client, PREFIX).dropped == 0
        yield server.store, client


@pytest.mark.parametrize("lanes", [True, False], ids=["lane", "grpc"])
def test_it_is_dropped_and_stored_again(lanes, caplog):
    with serving(lanes) as (store, client):
        for number, kind in enumerate(Kind, 1):
            wanted = RANGES[kind]
            spoil(store, PREFIX.name(kind, TOKENS), kind)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "tailreplay.store.damage"):
                assert load(client, wanted) == "integrity"
            assert [r.message for r in caplog.records] == [
                f"dropped a damaged {kind.name.lower()} object of "
                f"{object_bytes(WIDE[kind], ROWS[kind])} bytes from memory"
            ]
            assert load(client, wanted) == "evicted"
            assert lane_objects.put(client, PREFIX).stored == 1
            assert load(client, wanted) == rows_of(wanted)
            assert counts(store) == (number, 0, number)
        assert (store.stats().pinned_bytes, len(store.leases)) == (0, 0)


@pytest.mark.redis
def test_what_redis_has_whole_takes_its_place(redis_server):
    with serving(redis_url=redis_server.url) as (store, client):
        until(lambda: not store.stats().redis_pending_bytes)
        in_redis = [t for t in store.stats().tiers if t.tier == pb.TIER_REDIS]
        for number, kind in enumerate(Kind, 1):
            wanted = RANGES[kind]
            spoil(store, PREFIX.name(kind, TOKENS), kind)
            assert load(client, wanted) == "integrity"
            assert load(client, wanted) == rows_of(wanted)
            assert store.tiers.redis_status()["loaded"] == number
            assert counts(store) == (number, 0, number)
        assert [t for t in store.stats().tiers if t.tier == pb.TIER_REDIS] == in_redis
        assert lane_objects.put(client, PREFIX).stored == 0


@pytest.mark.redis
def test_what_is_erased_while_its_copy_comes_does_not_stay_in_the_pool(redis_server):
    with serving(redis_url=redis_server.url) as (store, _):
        until(lambda: not store.stats().redis_pending_bytes)
        store.catalog.room.make(store.tiers.pool_bytes)
        record, pin = store.catalog.select(lambda _: True)[0], store.tiers.pin

        def pinned(*wanted, **how):
            came = pin(*wanted, **how)
            store.catalog.lost(record)  # as an erasure does first
            return came

        store.tiers.pin = pinned
        store._damage._fetch_anew(record)
        assert store.tiers.redis_status()["loaded"] == 1
        assert store.tiers.used_bytes == 0


def spoil_in_redis(url: str, name) -> None:
    """Flips a bit of a payload and seals it anew, as a store that writes damaged memory would."""
    with closing(redis.Redis.from_url(url)) as values:
        what = f"{name.kind.name.lower()}@*@{name.prefix_hash.hex()}"
        (key,) = values.keys(f"tailreplay:o:*|{what}")
        payload = bytearray(values.get(key)[32:])
        payload[-100] ^= 8
        values.set(key, b"".join(Plain().wrap(key, memoryview(payload))))


@pytest.mark.redis
def test_what_redis_has_goes_as_well_if_that_is_damaged_too(redis_server):
    wanted, name = RANGES[CHECKPOINT], PREFIX.name(CHECKPOINT, TOKENS)
    with serving(redis_url=redis_server.url) as (store, client):
        until(lambda: not store.stats().redis_pending_bytes)
        spoil_in_redis(redis_server.url, name)
        spoil(store, name, CHECKPOINT)
        assert load(client, wanted) == "integrity"
        assert counts(store) == (1, 0, 2)
        assert not client.match(PREFIX.namespace, PREFIX.tokens, timeout_s=WAIT_S).checkpoints
        assert lane_objects.put(client, PREFIX).stored == 1
        assert load(client, wanted) == rows_of(wanted)


@pytest.mark.redis
def test_a_damaged_header_costs_one_reader_and_no_copy_in_redis(redis_server):
    wanted, name = RANGES[KV], PREFIX.name(KV, TOKENS)
    with serving(redis_url=redis_server.url) as (store, client):
        until(lambda: not store.stats().redis_pending_bytes)
        spoil(store, name, KV, back=object_bytes(WIDE[KV], 256) - 60)
        assert load(client, wanted) == "integrity"
        assert load(client, wanted) == rows_of(wanted)
        assert counts(store) == (0, 0, 1)


@pytest.mark.parametrize("first", [0, 433], ids=["ends", "begins"])
@pytest.mark.parametrize("lanes", [True, False], ids=["lane", "grpc"])
def test_of_a_page_that_is_sent_in_part_the_store_sees_it_itself(lanes, first):
    """Rows of it go under a checksum of their own, which says nothing of what was stored."""
    wanted = span_range(KV, first, 433 if not first else TOKENS)
    with serving(lanes) as (store, client):
        # In the row before the 433rd, or behind it, of the last unit; the page is that of both.
        back = (TOKENS - 433) * WIDE[KV].row_bytes + (5 if not first else -5)
        spoil(store, PREFIX.name(KV, TOKENS), KV, back=back)
        assert load(client, wanted) == "integrity"
        assert counts(store) == (0, 0, 1)
        assert lane_objects.put(client, PREFIX).stored == 1
        assert load(client, wanted) == rows_of(wanted)


@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_placed_in_shared_memory_is_checked_before_if_it_always_is(tmp_path, kind):
    wanted = RANGES[kind]
    listen = f"unix://{tmp_path}/s.sock"
    with serving(listen=listen, verify="always") as (store, client):
        client._lanes.give_back(lane := client._lanes.take())
        assert lane.segment is not None
        assert load(client, wanted) == rows_of(wanted)
        # In the first row of the last unit, of a page that is sent whole.
        spoil(store, PREFIX.name(kind, TOKENS), kind, back=ROWS[kind] * WIDE[kind].row_bytes - 7)
        assert load(client, wanted) == "integrity"
        assert counts(store) == (0, 0, 1)
        assert lane_objects.put(client, PREFIX).stored == 1
        assert load(client, wanted) == rows_of(wanted)


def test_it_is_gone_for_others_while_somebody_still_reads_it():
    wanted, name = RANGES[KV], PREFIX.name(KV, TOKENS)
    rest, stop = threading.Event(), threading.Event()

    def hold(kind: Kind) -> None:
        if not rest.is_set():
            rest.set()
            stop.wait(WAIT_S)

    with serving(before_rows=hold) as (store, client):
        spoil(store, name, KV)
        reading = threading.Thread(target=load, args=(client, wanted))
        with closing_thread(reading, stop):
            rest.wait(WAIT_S)
            assert load(client, wanted) == "integrity"
            assert load(client, wanted) == "evicted"
            assert store.tiers.pinned_bytes
        until(lambda: not store.tiers.pinned_bytes)
        assert lane_objects.put(client, PREFIX).stored == 1
        assert load(client, wanted) == rows_of(wanted)


def test_a_whole_copy_that_is_stored_right_after_the_look_stays():
    wanted, name = RANGES[KV], PREFIX.name(KV, TOKENS)
    with serving() as (store, client):
        spoil(store, name, KV)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens, timeout_s=WAIT_S).leaf
        unpin = store.tiers.unpin

        def unpinned(held):
            unpin(held)
            store.tiers.unpin = unpin
            store.catalog.room.make(16 * MIB)
            put_here(store)

        store.tiers.unpin = unpinned
        assert client.report_damage(PREFIX.namespace, leaf, KV, name.prefix_hash)
        assert load(client, wanted) == rows_of(wanted)


@pytest.mark.redis
def test_others_may_report_while_somebody_still_reads_what_redis_is_to_replace(redis_server):
    rest, stop, waits = threading.Event(), threading.Event(), threading.Event()

    def hold(kind: Kind) -> None:
        if kind is CHECKPOINT and not rest.is_set():
            rest.set()
            stop.wait(WAIT_S)

    with serving(before_rows=hold, redis_url=redis_server.url) as (store, client):
        until(lambda: not store.stats().redis_pending_bytes)
        for kind in (KV, CHECKPOINT):
            spoil(store, PREFIX.name(kind, TOKENS), kind)
        wait = store.tiers.wait_until_gone

        def waiting(names, timeout_s):
            waits.set()
            return wait(names, WAIT_S)

        store.tiers.wait_until_gone = waiting
        reading = threading.Thread(target=load, args=(client, RANGES[CHECKPOINT]))
        with closing_thread(reading, stop):
            assert rest.wait(WAIT_S)
            other = threading.Thread(target=load, args=(client, RANGES[CHECKPOINT]))
            with closing_thread(other, stop):
                assert waits.wait(WAIT_S)
                store.tiers.wait_until_gone = wait
                assert load(client, RANGES[KV]) == "integrity"
                assert load(client, RANGES[KV]) == rows_of(RANGES[KV])
        until(lambda: not store.tiers.pinned_bytes)
        until(lambda: store.tiers.redis_status()["loaded"] == 2)
        assert load(client, RANGES[CHECKPOINT]) == rows_of(RANGES[CHECKPOINT])


@contextmanager
def closing_thread(thread: threading.Thread, stop: threading.Event):
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def running(tmp_path_factory, clock):
    folder = tmp_path_factory.mktemp("store")
    config = StoreConfig(listen=f"unix://{folder}/s.sock", pool_bytes=16 * MIB)
    with closing(Store(config, clock=clock)) as store:
        yield store


@pytest.fixture
def store(running, clock):
    """A store that is empty, believes everybody, and has counted nothing."""
    clock.now_s += 60
    running.admin.forgetter.clear(pb.ClearRequest(everything=True))
    running.catalog._held.counts.clear()
    return running


def put_here(store: Store, caller: Principal | None = None, prefix: Prefix = PREFIX) -> None:
    store.put(put_frames(prefix), lambda: None, *([caller] if caller else []))


def claim(store: Store, end: int = TOKENS, *caller: Principal, leaf: bytes = STATE):
    """Reports the keys and values of a block; says whether the store has looked, and found."""
    request = pb.ReportDamageRequest(
        namespace=PREFIX.namespace,
        leaf=leaf,
        kind=pb.KIND_KV,
        prefix_hash=PREFIX.chain.prefix_hash(end),
    )
    answer = store.report_damage(request, *caller)
    return answer.checked, answer.damaged


def test_who_lies_makes_nothing_go_and_is_not_heard_for_a_second(store, clock):
    put_here(store)
    used = store.tiers.used_bytes
    assert claim(store) == (True, False)
    assert claim(store) == claim(store, 256) == (False, False)
    assert counts(store) == (1, 1, 0)
    clock.now_s += 1.1
    assert claim(store) == (True, False)
    assert counts(store) == (2, 2, 0)
    assert store.tiers.used_bytes == used
    assert runs_of(store.match(match_request()), KV) == [(0, TOKENS)]


def match_request() -> pb.MatchRequest:
    return pb.MatchRequest(namespace=PREFIX.namespace, tokens=to_wire(PREFIX.tokens))


def test_one_object_is_looked_at_at_a_time(store):
    put_here(store)
    with store._damage._looking:
        assert claim(store) == (False, False)
    assert counts(store) == (0, 0, 0)
    assert claim(store) == (True, False)


def test_all_who_have_read_it_may_report_it(store, clock):
    put_here(store)
    spoil(store, PREFIX.name(KV, 256), KV)
    assert claim(store, 256) == (True, True)
    put_here(store)
    assert claim(store, 256) == (True, True), "the second reader's"
    assert counts(store) == (1, 0, 1)
    clock.now_s += 20
    assert claim(store, 256) == (True, False)


@pytest.mark.parametrize("wrong", ["name", "leaf", "kind"])
def test_what_there_is_not_is_not_looked_at(store, wrong):
    put_here(store)
    request = pb.ReportDamageRequest(
        namespace=PREFIX.namespace,
        leaf=bytes(32) if wrong == "leaf" else STATE,
        kind=pb.KIND_UNSPECIFIED if wrong == "kind" else pb.KIND_KV,
        prefix_hash=bytes(32) if wrong == "name" else STATE,
    )
    assert not store.report_damage(request).checked
    assert counts(store) == (0, 0, 0)


def test_a_tenant_reports_nothing_of_another_and_silences_nobody_else(store):
    acme, rival = (Principal(Role.TENANT, name) for name in ("acme", "rival"))
    put_here(store, acme)
    assert claim(store, TOKENS, rival) == (False, False)
    assert claim(store, TOKENS, acme) == (True, False)
    put_here(store, rival)
    assert claim(store, TOKENS, acme) == (False, False)
    assert claim(store, TOKENS, rival) == (True, False)


def test_tenants_report_what_is_public(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.json", **TENANTS)
    with (
        serve_in_thread(token_file=tokens, pool_bytes=16 * MIB) as server,
        StoreClient(server.address, credentials=bearer(tmp_path, "root")) as operator,
        # Not over a lane, where rows are placed and nobody checks them.
        StoreClient(server.address, credentials=bearer(tmp_path, "acme"), lanes=False) as tenant,
        operating(server, tmp_path) as admin,
    ):
        lane_objects.put(operator, PREFIX)
        wire = match_request()
        admin.AddPublic(
            pb.AddPublicRequest(namespace=wire.namespace, tokens=wire.tokens), timeout=WAIT_S
        )
        public = Principal(Role.ADMIN).scoped(PREFIX.namespace)
        spoil(server.store, ObjectName(public, KV, STATE), KV)
        assert load(tenant, RANGES[KV]) == "integrity"
        assert counts(server.store) == (1, 0, 1)
        assert load(tenant, RANGES[KV]) == "evicted"


class Older(StoreService):
    """A service that does not know the call."""

    ReportDamage = rpc.StoreServicer.ReportDamage


def test_a_store_that_does_not_know_the_call_is_as_it_was(store):
    put_here(store)
    spoil(store, PREFIX.name(KV, TOKENS), KV)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_StoreServicer_to_server(Older(store, None, Access(None), max_streams=4), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with StoreClient(f"127.0.0.1:{port}", match_timeout_s=WAIT_S) as client:
        assert load(client, RANGES[KV]) == load(client, RANGES[KV]) == "integrity"
        assert load(client, RANGES[HIDDEN]) == rows_of(RANGES[HIDDEN])
    server.stop(0).wait()
    assert counts(store) == (0, 0, 0)
