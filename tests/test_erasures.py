"""An erasure asked for at one store is carried out by all that share its Redis."""

import os
import threading
from contextlib import closing

import pytest
import redis
from store_objects import GEOMETRY, Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.eraser import Erased
from tailreplay.store.erasure_ledger import Erasure, ErasureLedger, new_erasure_id
from tailreplay.store.header import object_bytes
from tailreplay.store.ledger import Ledger
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

KV = Kind.KV
ACME = tenant_digest("acme")
BLOCK = object_bytes(GEOMETRY[KV], 256)


def prefix_of(tenant: bytes) -> Prefix:
    return Prefix(os.urandom(32), range(1000), tenant=tenant)


def put(client: Client, prefix: Prefix) -> None:
    """Stores a prefix, in Redis too."""
    client.put(prefix)
    until(lambda: not client.stats().redis_pending_bytes)


def erase(client: Client) -> pb.EraseResponse:
    return client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=30)


@pytest.fixture
def keys(redis_server):
    """Keys in Redis that have anything of a namespace; whose it is is nothing of it."""
    with closing(redis.Redis.from_url(redis_server.url)) as raw:

        def keys(prefix: Prefix) -> list[bytes]:
            named = (prefix.namespace, prefix.namespace.hex().encode())
            stored = [key for key in raw.keys("*") if not key.startswith(b"tailreplay:a:")]
            return [key for key in stored if any(name in key for name in named)]

        yield keys


@pytest.fixture
def stores(redis_server):
    """Two stores on one Redis, and a client of each."""
    with (
        serve_in_thread(redis_url=redis_server.url) as first,
        serve_in_thread(redis_url=redis_server.url) as second,
        closing(Client(first.address)) as one,
        closing(Client(second.address)) as two,
    ):
        yield (first, one), (second, two)


def test_a_tenants_first_put_at_another_store_is_erased_at_once(stores, keys):
    (first, writer), (_, operator) = stores
    prefix = prefix_of(ACME)
    writer.put(prefix)  # whose it is has not reached Redis, nor has all of its payload
    answer = erase(operator)
    assert (answer.stores, answer.silent_stores, answer.namespaces) == (1, 0, 1)
    assert (answer.cpu_objects_left, answer.redis_keys_left, answer.held_objects) == (0, 0, 0)
    assert answer.overwritten_bytes > 3 * BLOCK
    assert sum(t.objects for t in answer.removed if t.tier == pb.TIER_CPU) == 21
    assert writer.match(prefix).matched_tokens == 0
    assert not first.store.catalog.select(lambda _: True)
    assert not keys(prefix)
    assert first.store.catalog.quotas.owner(prefix.namespace) == b""


def test_what_is_stored_after_an_erasure_is_the_tenants_again(stores, redis_server, tables, keys):
    (_, writer), (_, operator) = stores
    prefix = prefix_of(ACME)
    writer.put(prefix)
    erase(operator)
    put(writer, prefix)
    # A second erasure knows of it, and so does one after a restart that has forgotten nothing.
    until(lambda: Ledger(tables).owners_of([prefix.namespace]))
    with (
        serve_in_thread(redis_url=redis_server.url) as third,
        closing(Client(third.address)) as reader,
    ):
        assert reader.fetch(prefix, span_range(KV, 0, 1000)).ended == [0]
        third.store.admin.erasures.tick()  # the erasure before was none of its own
        assert reader.match(prefix).matched_tokens == 1000
        answer = erase(operator)
        assert (answer.stores, answer.silent_stores, answer.namespaces) == (2, 0, 1)
        assert (answer.cpu_objects_left, answer.redis_keys_left) == (0, 0)
        assert reader.match(prefix).matched_tokens == writer.match(prefix).matched_tokens == 0
        assert not keys(prefix)


def test_who_erases_again_has_the_same_looked_for(stores, tables, keys):
    """Whose it was is forgotten with the first erasure, so the second one proved nothing."""
    (_, writer), (_, operator) = stores
    prefix, taken = prefix_of(ACME), prefix_of(ACME)
    writer.put(prefix)
    writer.put(taken)
    assert erase(operator).namespaces == 2
    raw = redis.Redis(connection_pool=tables.client.connection_pool)
    left = tables.prefix + b"o:" + prefix.namespace.hex().encode() + b"|kv@left"
    raw.set(left, b"as a store leaves it that did not answer")
    other = Prefix(taken.namespace, taken.ids, tenant=tenant_digest("other"))
    writer.put(other)
    until(lambda: Ledger(tables).owners_of([other.namespace]))
    answer = erase(operator)
    assert (answer.namespaces, answer.redis_keys_deleted, answer.redis_keys_left) == (1, 1, 0)
    assert not keys(prefix)
    assert writer.match(other).matched_tokens == 1000


def test_a_store_that_does_not_know_whose_it_has_read_is_told(stores, redis_server, keys):
    """One knows the tenant, another has the bytes, and the erasure is asked for at a third."""
    (first, writer), (_, operator) = stores
    with (
        serve_in_thread(redis_url=redis_server.url) as third,
        closing(Client(third.address)) as reader,
    ):
        prefix = prefix_of(ACME)
        put(writer, prefix)
        until(lambda: reader.fetch(prefix, span_range(KV, 0, 1000)).ended == [0])
        with closing(redis.Redis.from_url(redis_server.url)) as raw:
            first.store.admin.operators.disown([])
            raw.delete(*raw.keys("tailreplay:a:owner:*") or ["none"])
            third.store.catalog.quotas.disown([prefix.namespace])
            answer = erase(operator)
        assert (answer.stores, answer.silent_stores, answer.namespaces) == (2, 0, 1)
        assert reader.match(prefix).matched_tokens == 0
        assert not third.store.catalog.select(lambda _: True)
        assert not keys(prefix)


def test_a_store_that_comes_late_erases_all_the_same(stores, tables, keys):
    (_, writer), _ = stores
    prefix = prefix_of(ACME)
    put(writer, prefix)
    asker = ErasureLedger(tables, b"asker")
    erasure_id = new_erasure_id()
    asker.close(erasure_id)  # it has given up on others
    asker.ask(erasure_id, Erasure(ACME, frozenset()))
    until(lambda: writer.match(prefix).matched_tokens == 0)
    until(lambda: not keys(prefix))
    assert asker.answers(erasure_id) == {}


def test_a_store_of_which_redis_knows_nothing_erases_when_it_is_back(stores, redis_server, keys):
    """Redis was flushed, or the store held up: nobody waits for it, but it is asked."""
    (first, writer), (_, operator) = stores
    prefix = prefix_of(ACME)
    put(writer, prefix)
    erasures = first.store.admin.erasures
    tick, erasures.tick = erasures.tick, lambda: None
    with closing(redis.Redis.from_url(redis_server.url)) as raw:
        raw.flushall()
    answer = erase(operator)
    assert (answer.stores, answer.silent_stores) == (0, 0)
    erasures.tick = tick
    until(lambda: writer.match(prefix).matched_tokens == 0)
    until(lambda: not keys(prefix))


@pytest.mark.parametrize("forget", ["erase", "clear"])
def test_what_the_asker_reads_of_before_others_are_done_goes_too(stores, keys, forget):
    (_, writer), (second, operator) = stores
    prefix = prefix_of(ACME)
    put(writer, prefix)
    until(lambda: second.store.admin.operators._ledger.namespaces_of(ACME))
    ledger = second.store.admin.erasures._ledger
    ask = ledger.ask

    def read_first(*what) -> None:
        ledger.ask = ask
        until(lambda: operator.fetch(prefix, span_range(KV, 0, 1000)).ended == [0])
        ask(*what)

    ledger.ask = read_first
    answer = erase(operator) if forget == "erase" else clear(operator)
    assert answer.stores == 1
    assert not second.store.catalog.select(lambda _: True)
    assert not second.store.tiers.used_bytes
    assert not keys(prefix)


def test_what_others_have_read_of_and_redis_has_not_is_looked_for_again(
    stores, keys, redis_server, monkeypatch
):
    (first, writer), (_, operator) = stores
    monkeypatch.setattr("tailreplay.store.erasures._AGAIN_S", (0.0,))
    gone, kept = prefix_of(ACME), prefix_of(ACME)
    for prefix in (gone, kept):
        put(writer, prefix)
    here = first.store.admin.erasures._here

    def nothing_yet(erasure: Erasure) -> Erased:
        """As if it read of all of it right behind that."""
        with closing(redis.Redis.from_url(redis_server.url)) as raw:
            raw.delete("none", *[key for key in keys(gone) if b":o:" in key])
        return Erased(namespaces={gone.namespace, kept.namespace})

    first.store.admin.erasures._here = nothing_yet
    request = pb.ClearRequest(namespace=os.urandom(32))
    assert operator.admin.Clear(request, timeout=30).stores == 1
    space = gone.namespace
    until(lambda: not first.store.catalog.select(lambda r: r.name.namespace == space))
    first.store.admin.erasures._here = here
    assert writer.fetch(kept, span_range(KV, 0, 1000)).ended == [0]


def test_where_redis_has_everything_free_room_is_not_overwritten_again(stores):
    (first, writer), _ = stores
    prefix = prefix_of(ACME)
    put(writer, prefix)
    overwritten, tiers = [], first.store.tiers
    tiers.overwrite_free = lambda: overwritten.append(True)
    done = Erased(namespaces={prefix.namespace})
    first.store.admin.erasures._eraser.drop_again(done, overwrite=True)
    assert not overwritten
    assert writer.fetch(prefix, span_range(KV, 0, 1000)).ended == [0]
    tiers.delete_in_redis([prefix.name(kind, end) for kind, _, end in prefix.spans()])
    first.store.admin.erasures._eraser.drop_again(done, overwrite=True)
    assert overwritten == [True]
    assert not first.store.catalog.select(lambda _: True)


def test_who_has_read_what_only_a_late_store_knows_to_be_the_tenants_is_told(
    stores, redis_server, keys
):
    """The one who is asked has the bytes, and no word of whose they are."""
    (first, writer), (second, operator) = stores
    for store in (first, second):
        store.store.admin.operators.tick = lambda: None  # none learns or tells whose what is
    prefix = prefix_of(ACME)
    put(writer, prefix)
    until(lambda: operator.fetch(prefix, span_range(KV, 0, 1000)).ended == [0])
    erasures = first.store.admin.erasures
    tick, erasures.tick = erasures.tick, lambda: None
    with closing(redis.Redis.from_url(redis_server.url)) as raw:
        raw.flushall()
    assert erase(operator).stores == 0
    erasures.tick = tick
    until(lambda: not first.store.catalog.select(lambda _: True))
    until(lambda: not second.store.catalog.select(lambda _: True))
    until(lambda: not keys(prefix))


def clear(client: Client) -> pb.ClearResponse:
    return client.admin.Clear(pb.ClearRequest(tenant=ACME), timeout=30)


@pytest.mark.parametrize("forget", [erase, clear])
def test_what_was_asked_for_and_redis_has_lost_is_asked_again(stores, redis_server, keys, forget):
    (first, writer), (_, operator) = stores
    prefix = prefix_of(ACME)
    put(writer, prefix)
    erasures = first.store.admin.erasures
    tick, erasures.tick = erasures.tick, lambda: None
    with closing(redis.Redis.from_url(redis_server.url)) as raw:
        raw.flushall()
        forget(operator)
        raw.flushall()
        until(lambda: keys(prefix))  # the other store knows of nothing, and has made up for it
    erasures.tick = tick
    until(lambda: writer.match(prefix).matched_tokens == 0)
    until(lambda: not keys(prefix))
    assert writer.put(prefix).stored == 21
    for store in stores:
        store[0].store.admin.erasures.redis_lost()
        store[0].store.admin.erasures.tick()
    assert writer.match(prefix).matched_tokens == 1000


@pytest.mark.parametrize("patience_s", [20.0, 0.0])
def test_a_commit_that_is_under_way_leaves_nothing_of_what_is_erased(
    redis_server, keys, patience_s
):
    """Its manifest comes to Redis after the look at what is there, or just before."""
    prefix = prefix_of(ACME)
    gate, entered = threading.Event(), threading.Event()
    with (
        serve_in_thread(redis_url=redis_server.url) as server,
        closing(Client(server.address)) as client,
    ):
        store = server.store
        store.admin._eraser._patience_s = patience_s
        commit = store.manifests.commit

        def held_up(entries):
            entered.set()
            assert gate.wait(20)
            return commit(entries)

        store.manifests.commit = held_up
        client.put(prefix)
        assert entered.wait(20)
        eraser = threading.Thread(target=erase, args=(client,))
        eraser.start()
        until(lambda: not store.catalog.select(lambda _: True))
        eraser.join(0.5 if patience_s else 20)  # who waits for the commit does not end before it
        gate.set()
        eraser.join(20)
        if patience_s:
            assert not keys(prefix)
        else:
            until(lambda: not store.catalog.redis._under_way)
            assert not any(entries for _, entries in store.manifests.load())


def test_what_a_late_store_sweeps_is_what_names_nothing(stores, keys):
    (first, writer), _ = stores
    kept, gone = prefix_of(ACME), prefix_of(ACME)
    for prefix in (kept, gone):
        put(writer, prefix)
    had = set(keys(kept))
    records = first.store.catalog.select(lambda r: r.name.namespace == gone.namespace)
    first.store.catalog.lost(*records)
    first.store.tiers.delete([record.name for record in records])
    assert keys(gone)
    ledger = first.store.admin.operators._ledger
    assert ledger.sweep({kept.namespace, gone.namespace}) == 4
    assert not keys(gone)
    assert set(keys(kept)) == had
    assert ledger.sweep(None) == 0


CLEARED = {
    "namespace": lambda prefix: pb.ClearRequest(namespace=prefix.namespace),
    "tenant": lambda prefix: pb.ClearRequest(tenant=prefix.tenant),
    "everything": lambda prefix: pb.ClearRequest(everything=True),
}


@pytest.mark.parametrize("scope", CLEARED)
def test_what_is_cleared_at_one_store_is_gone_at_all(stores, keys, scope):
    (first, writer), (second, operator) = stores
    prefix, other = prefix_of(ACME), prefix_of(tenant_digest("rival"))
    for one in (prefix, other):
        put(writer, one)
        until(lambda one=one: operator.fetch(one, span_range(KV, 0, 1000)).ended == [0])
    answer = operator.admin.Clear(CLEARED[scope](prefix), timeout=30)
    assert (answer.stores, answer.silent_stores) == (1, 0)
    both = 2 if scope == "everything" else 1
    removed = {(t.tier, t.kind): t.objects for t in answer.removed}
    assert removed[pb.TIER_CPU, KV] == 2 * 4 * both
    for client in (writer, operator):
        assert client.match(prefix).matched_tokens == 0
        assert client.match(other).matched_tokens == (0 if both == 2 else 1000)
    assert not keys(prefix)
    assert bool(keys(other)) == (both == 1)
    assert first.store.catalog.quotas.owner(prefix.namespace) == ACME
    assert not second.store.tiers.pinned_bytes
    assert writer.put(prefix).stored == 21


def test_everything_is_what_no_store_knows_as_well(stores, redis_server):
    _, (_, operator) = stores
    with closing(redis.Redis.from_url(redis_server.url)) as raw:
        unknown = [b"tailreplay:m:" + bytes(64), b"tailreplay:o:" + b"00" * 32 + b"|kv@0@1@ab"]
        others = b"somebody:else"
        for key in (*unknown, others):
            raw.set(key, b"")
        operator.admin.Clear(pb.ClearRequest(everything=True), timeout=30)
        assert raw.exists(*unknown) == 0
        assert raw.exists(others)


@pytest.mark.slow
def test_writers_that_go_on_meanwhile_leave_nothing_that_a_last_erasure_misses(stores, keys):
    (first, one), (second, two) = stores
    stop, written = threading.Event(), []

    def write(address: str) -> None:
        with closing(Client(address)) as writer:
            while not stop.is_set():
                written.append(prefix_of(ACME))
                writer.put(written[-1])

    writers = [
        threading.Thread(target=write, args=(store.address,)) for store in (first, second) * 2
    ]
    for writer in writers:
        writer.start()
    try:
        for operator in (one, two, one):
            assert erase(operator).silent_stores == 0
    finally:
        stop.set()
        for writer in writers:
            writer.join(30)
    answer = erase(two)
    assert (answer.cpu_objects_left, answer.redis_keys_left, answer.held_objects) == (0, 0, 0)
    for store in (first, second):
        assert not store.store.catalog.select(lambda _: True)
    assert not [key for prefix in written for key in keys(prefix)]
