"""What operators do, over real gRPC on LMCache's pool."""

import os
import threading
from contextlib import closing

import grpc
import pytest
from service_calls import code_of
from store_objects import GEOMETRY, Client, Prefix, put_frames, runs_of, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.header import object_bytes
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire

MIB = 1 << 20
KV, HIDDEN, CHECKPOINT = Kind
BLOCK = object_bytes(GEOMETRY[KV], 256)
TEN_BLOCKS = range(2560)


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(pool_bytes=4 * MIB, fetch_window_bytes=MIB) as running:
        yield running


@pytest.fixture(scope="module")
def whole_client(server):
    with closing(Client(server.address)) as client:
        yield client


@pytest.fixture
def client(whole_client):
    """The module's client, of an empty store without pins and limits."""
    yield whole_client
    for pin in whole_client.admin.ListPins(pb.ListPinsRequest()).pins:
        whole_client.admin.Unpin(pb.UnpinRequest(pin_id=pin.pin_id))
    for tenant in tenants(whole_client):
        if tenant:
            whole_client.admin.DeleteQuota(pb.DeleteQuotaRequest(tenant=tenant))
    whole_client.admin.Clear(pb.ClearRequest(everything=True))
    assert whole_client.stats().pool_used_bytes == 0


def prefix_of(ids=TEN_BLOCKS, tenant: str = "", space: bytes | None = None) -> Prefix:
    return Prefix(space or os.urandom(32), ids, tenant=tenant_digest(tenant))


def tenants(client: Client, tenant: bytes = b"") -> dict[bytes, pb.TenantInfo]:
    answer = client.admin.ListTenants(pb.ListTenantsRequest(tenant=tenant), timeout=20)
    return {info.tenant: info for info in answer.tenants}


def info(client: Client, tenant: str) -> pb.TenantInfo:
    digest = tenant_digest(tenant)
    return tenants(client, digest)[digest]


def pin(client: Client, prefix: Prefix, max_bytes: int = 0, seconds: float = 60) -> pb.PinInfo:
    request = pb.PinRequest(
        namespace=prefix.namespace,
        tokens=to_wire(prefix.tokens),
        max_bytes=max_bytes,
        seconds=seconds,
    )
    return client.admin.Pin(request, timeout=20)


def fill(client: Client, pools: float = 1.5) -> None:
    """Stores so many times the pool's size of prefixes that nobody asks for again."""
    blocks = int(pools * client.stats().pool_bytes / BLOCK)
    for first in range(0, blocks, 40):
        prefix = prefix_of(range(first, first + 40 * 256))
        assert client.put(prefix, prefix.spans(KV)).dropped == 0


def kv_tokens(client: Client, prefix: Prefix) -> int:
    runs = runs_of(client.match(prefix), KV)
    return sum(end - first for first, end in runs)


def test_a_pinned_prefix_outlives_a_pool_full_of_others_until_it_is_let_go(client):
    pinned, other = prefix_of(), prefix_of()
    client.put(pinned, pinned.spans(KV))
    client.put(other, other.spans(KV))
    made = pin(client, pinned)
    assert (made.tokens, made.objects, made.bytes) == (2560, 10, 10 * BLOCK)
    assert (made.left_out_bytes, made.pinned_tokens) == (0, 2560)
    assert 0 < made.expires_in_s <= 60
    fill(client)
    assert (kv_tokens(client, pinned), kv_tokens(client, other)) == (2560, 0)
    assert client.admin.Unpin(pb.UnpinRequest(pin_id=made.pin_id)).was_there
    assert not client.admin.Unpin(pb.UnpinRequest(pin_id=made.pin_id)).was_there
    fill(client)
    assert kv_tokens(client, pinned) == 0


def test_a_pin_holds_no_more_than_it_may_and_early_blocks_first(client):
    prefix = prefix_of()
    client.put(prefix)
    made = pin(client, prefix, max_bytes=3 * BLOCK + 1)
    assert (made.objects, made.bytes, made.pinned_tokens) == (3, 3 * BLOCK, 768)
    everything = sum(t.bytes for t in client.stats().tiers)
    assert made.left_out_bytes == everything - 3 * BLOCK
    fill(client)
    assert runs_of(client.match(prefix), KV) == [(0, 768)]


def test_pins_together_hold_no_more_than_their_share(server, client):
    share = server.store.tiers.pool_bytes // 4
    prefix = prefix_of(range(60 * 256))
    client.put(prefix, prefix.spans(KV))
    assert share < 60 * BLOCK
    made = pin(client, prefix)
    assert share - BLOCK < made.bytes <= share
    another = prefix_of()
    client.put(another, another.spans(KV))
    assert pin(client, another).objects == 0


def test_a_pin_ends_by_itself(server, client):
    prefix = prefix_of()
    client.put(prefix, prefix.spans(KV))
    pin(client, prefix, seconds=0.01)
    until(lambda: not client.admin.ListPins(pb.ListPinsRequest()).pins)
    fill(client)
    assert kv_tokens(client, prefix) == 0


def test_two_pins_of_one_prefix_end_one_by_one(client):
    prefix = prefix_of()
    client.put(prefix, prefix.spans(KV))
    first, _ = pin(client, prefix), pin(client, prefix)
    client.admin.Unpin(pb.UnpinRequest(pin_id=first.pin_id))
    fill(client)
    assert kv_tokens(client, prefix) == 2560


def test_pinned_objects_can_still_be_fetched_and_cleared(client):
    prefix = prefix_of()
    client.put(prefix)
    made = pin(client, prefix)
    fetched = client.fetch(prefix, span_range(KV, 0, 2560))
    assert fetched.rows[0] == prefix.rows(KV, 0, 2560)
    client.admin.Clear(pb.ClearRequest(namespace=prefix.namespace))
    assert client.match(prefix).matched_tokens == 0
    client.put(prefix)  # a name that was pinned and has gone is like any other
    client.admin.Unpin(pb.UnpinRequest(pin_id=made.pin_id))
    fill(client)
    assert kv_tokens(client, prefix) == 0


@pytest.mark.parametrize(
    ("seconds", "stored", "said"),
    [(0, True, "seconds is 0.0"), (60, False, "nothing is stored")],
)
def test_a_pin_without_time_or_payload_is_refused(client, seconds, stored, said):
    prefix = prefix_of()
    if stored:
        client.put(prefix)
    code, details = code_of(lambda: pin(client, prefix, seconds=seconds))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in details


def quota(client: Client, tenant: str, **limits: int) -> pb.TenantInfo:
    request = pb.SetQuotaRequest(tenant=tenant_digest(tenant), **limits)
    return client.admin.SetQuota(request, timeout=20)


def test_over_its_quota_a_tenants_own_oldest_blocks_go_and_nobody_elses(client):
    bystander = prefix_of(tenant="bystander")
    client.put(bystander, bystander.spans(KV))
    quota(client, "acme", cpu_bytes=15 * BLOCK)
    old, new = prefix_of(tenant="acme"), prefix_of(tenant="acme")
    assert client.put(old, old.spans(KV)).stored == 10
    assert client.put(new, new.spans(KV)).stored == 10
    assert (kv_tokens(client, old), kv_tokens(client, new)) == (5 * 256, 2560)
    assert kv_tokens(client, bystander) == 2560
    told = info(client, "acme")
    assert (told.cpu_bytes, told.cpu_limit_bytes) == (15 * BLOCK, 15 * BLOCK)
    assert told.refused_objects == 0
    assert told.evicted_bytes >= 5 * BLOCK
    assert info(client, "bystander").evicted_bytes == 0


def test_what_alone_is_over_the_quota_is_refused_and_counted(client):
    quota(client, "acme", cpu_bytes=BLOCK - 1)
    prefix = prefix_of(tenant="acme")
    answer = client.put(prefix, prefix.spans(KV))
    assert (answer.stored, answer.dropped) == (0, 10)
    assert info(client, "acme").refused_objects >= 10
    client.admin.DeleteQuota(pb.DeleteQuotaRequest(tenant=tenant_digest("acme")))
    assert client.put(prefix, prefix.spans(KV)).stored == 10
    assert not info(client, "acme").HasField("cpu_limit_bytes")


def test_a_smaller_quota_holds_at_once(client):
    prefix = prefix_of(tenant="acme")
    client.put(prefix, prefix.spans(KV))
    assert quota(client, "acme", cpu_bytes=4 * BLOCK).cpu_bytes == 4 * BLOCK
    assert runs_of(client.match(prefix), KV) == [(0, 1024)]  # late blocks have gone first


def test_sums_of_a_tenant_are_those_of_its_objects(client):
    prefixes = [prefix_of(range(n, n + 700), tenant="acme") for n in range(3)]
    for prefix in prefixes:
        client.put(prefix)
    fill(client, 0.1)
    objects = sum(object_bytes(GEOMETRY[k], e - f) for k, f, e in prefixes[0].spans())
    assert info(client, "acme").cpu_bytes == 3 * objects
    client.admin.Clear(pb.ClearRequest(namespace=prefixes[0].namespace))
    assert info(client, "acme").cpu_bytes == 2 * objects


def test_a_namespace_stays_with_the_tenant_that_stored_first(client):
    mine = prefix_of(tenant="acme")
    client.put(mine)
    theirs = prefix_of(tenant="other", space=mine.namespace)
    code, details = code_of(lambda: client.put(theirs))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "belongs to another" in details


@pytest.mark.parametrize("size", [1, 15, 17])
def test_a_tenant_of_another_size_is_refused_everywhere(client, size):
    tenant = bytes(size)
    prefix = Prefix(os.urandom(32), range(300), tenant=tenant)
    for call in (
        lambda: client.put(prefix),
        lambda: client.admin.SetQuota(pb.SetQuotaRequest(tenant=tenant, cpu_bytes=1)),
        lambda: client.admin.DeleteQuota(pb.DeleteQuotaRequest(tenant=tenant)),
        lambda: client.admin.ListTenants(pb.ListTenantsRequest(tenant=tenant)),
        lambda: client.admin.Clear(pb.ClearRequest(tenant=tenant)),
        lambda: client.admin.Erase(pb.EraseRequest(tenant=tenant)),
        lambda: client.admin.SetMode(pb.SetModeRequest(tenant=tenant, mode="tail")),
    ):
        code, details = code_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{size} bytes, wanted" in details


@pytest.mark.parametrize("scope", ["everything", "namespace", "tenant"])
def test_clear_takes_its_scope_and_nothing_else(client, scope):
    mine, twin = prefix_of(tenant="acme"), prefix_of(tenant="acme")
    other = prefix_of(tenant="other")
    for prefix in (mine, twin, other):
        client.put(prefix)
    request = {
        "everything": pb.ClearRequest(everything=True),
        "namespace": pb.ClearRequest(namespace=mine.namespace),
        "tenant": pb.ClearRequest(tenant=mine.tenant),
    }[scope]
    removed = client.admin.Clear(request, timeout=20).removed
    cleared = {"everything": 3, "namespace": 1, "tenant": 2}[scope]
    assert {(t.tier, t.kind): t.objects for t in removed} == {
        (pb.TIER_CPU, pb.KIND_KV): 10 * cleared,
        (pb.TIER_CPU, pb.KIND_HIDDEN): 40 * cleared,
        (pb.TIER_CPU, pb.KIND_CHECKPOINT): cleared,
    }
    left = [client.match(p).matched_tokens for p in (mine, twin, other)]
    assert (
        left
        == {
            "everything": [0, 0, 0],
            "namespace": [0, 2560, 2560],
            "tenant": [0, 0, 2560],
        }[scope]
    )


def test_clear_without_a_scope_is_refused(client):
    code, details = code_of(lambda: client.admin.Clear(pb.ClearRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "scope is not set" in details


def test_erased_bytes_are_gone_from_the_pools_memory(server, client):
    prefix, other = prefix_of(tenant="erased"), prefix_of(tenant="other")
    client.put(prefix)
    client.put(other)
    with open(server.store.tiers.shm_path, "rb") as pool:
        row = prefix.rows(KV, 0, 256, first_unit=0, units=1)
        assert row in pool.read()
        answer = client.admin.Erase(pb.EraseRequest(tenant=prefix.tenant), timeout=20)
        pool.seek(0)
        left = pool.read()
    assert row not in left
    assert other.rows(KV, 0, 256, first_unit=0, units=1) in left
    assert (answer.namespaces, answer.has_redis) == (1, False)
    assert (answer.held_objects, answer.cpu_objects_left, answer.redis_keys_left) == (0, 0, 0)
    assert answer.overwritten_bytes == sum(t.bytes for t in answer.removed)
    assert client.match(prefix).matched_tokens == 0
    assert client.match(other).matched_tokens == 2560
    assert prefix.tenant not in tenants(client)


@pytest.mark.parametrize("how", ["cleared", "evicted"])
def test_what_had_left_the_index_before_is_gone_from_the_pools_memory_too(server, client, how):
    prefix, other = prefix_of(tenant="erased"), prefix_of(range(256), tenant="other")
    row = prefix.rows(KV, 2304, 2560, first_unit=0, units=1)
    client.put(prefix)
    if how == "cleared":
        client.admin.Clear(pb.ClearRequest(tenant=prefix.tenant), timeout=20)
    else:
        server.store.catalog.room.make(server.store.tiers.pool_bytes)
    client.put(other, other.spans(KV))
    with open(server.store.tiers.shm_path, "rb") as pool:
        assert row in pool.read()
        client.admin.Erase(pb.EraseRequest(tenant=prefix.tenant), timeout=20)
        pool.seek(0)
        left = pool.read()
    assert row not in left
    assert client.fetch(other, span_range(KV, 0, 256)).rows == {0: other.rows(KV, 0, 256)}


def test_what_was_on_its_way_when_it_was_erased_is_its_tenants_and_erased_the_next_time(
    server, client
):
    prefix = prefix_of(range(600), tenant="writes")
    frames = list(put_frames(prefix, prefix.spans(KV)))
    goes_on = threading.Event()

    def slowly():
        yield from frames[:3]
        assert goes_on.wait(20)
        yield from frames[3:]

    put = threading.Thread(target=lambda: client.stub.Put(slowly(), timeout=30))
    put.start()
    until(lambda: server.store.catalog.record(prefix.name(KV, 256)) is not None)
    request = pb.EraseRequest(tenant=prefix.tenant)
    assert client.admin.Erase(request, timeout=20).cpu_objects_left == 0
    assert prefix.tenant not in tenants(client)
    goes_on.set()
    put.join(30)
    assert prefix.tenant in tenants(client)
    answer = client.admin.Erase(request, timeout=20)
    assert (answer.namespaces, sum(t.objects for t in answer.removed)) == (1, 2)
    assert not server.store.catalog.select(lambda r: r.name.namespace == prefix.namespace)


def test_what_a_reader_holds_is_nobody_elses_stays_what_it_is_and_goes_with_it(server, client):
    """Zeros in place of rows would be wrong rows: who has them placed in memory checks nothing."""
    prefix = prefix_of(tenant="held")
    client.put(prefix, prefix.spans(KV))
    held = server.store.tiers.pin([(prefix.name(KV, 256), BLOCK)], urgent=True, timeout_s=5)
    data = bytes(held[0].data)
    answer = client.admin.Erase(pb.EraseRequest(tenant=prefix.tenant), timeout=20)
    assert (answer.held_objects, answer.cpu_objects_left) == (1, 0)
    removed = sum(t.bytes for t in answer.removed)
    assert answer.overwritten_bytes == removed - BLOCK
    assert bytes(held[0].data) == data
    assert prefix.rows(KV, 0, 256) in data
    with open(server.store.tiers.shm_path, "rb") as pool:
        assert data in pool.read()
        server.store.tiers.unpin(held)
        pool.seek(0)
        assert prefix.rows(KV, 0, 256, first_unit=0, units=1) not in pool.read()
    assert client.stats().pool_used_bytes == 0


def test_erasing_waits_for_readers_that_are_about_to_let_go(server, client):
    prefix = prefix_of(tenant="reader")
    client.put(prefix, prefix.spans(KV))
    held = server.store.tiers.pin([(prefix.name(KV, 256), BLOCK)], urgent=True, timeout_s=5)

    def let_go() -> None:
        until(lambda: server.store.catalog.record(prefix.name(KV, 256)) is None)
        server.store.tiers.unpin(held)

    reader = threading.Thread(target=let_go)
    reader.start()
    answer = client.admin.Erase(pb.EraseRequest(tenant=prefix.tenant), timeout=20)
    reader.join(20)
    assert answer.held_objects == 0
    assert answer.overwritten_bytes == sum(t.bytes for t in answer.removed)
    assert client.stats().pool_used_bytes == 0


def test_inspect_shows_every_object_of_a_prefix(client):
    prefix = prefix_of(range(600), tenant="acme")
    client.put(prefix)
    made = pin(client, prefix, max_bytes=BLOCK)
    request = pb.InspectRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens[:500]))
    answer = client.admin.Inspect(request, timeout=20)
    assert (answer.matched_tokens, answer.tenant) == (500, prefix.tenant)
    shown = [(Kind(o.kind), o.first_token, o.end_token) for o in answer.objects]
    wanted = [(KV, 0, 256), (KV, 256, 512)]
    wanted += [(HIDDEN, at, at + 64) for at in range(0, 512, 64)]
    assert shown == wanted
    first = answer.objects[0]
    assert first.size_bytes == BLOCK
    assert list(first.tiers) == [pb.TIER_CPU]
    assert first.provenance == pb.PROVENANCE_EXACT
    assert first.prefix_hash == prefix.chain.prefix_hash(256)
    assert [o.pinned for o in answer.objects] == [True] + [False] * (len(wanted) - 1)
    assert 0 <= answer.objects[1].idle_s < 60
    assert made.objects == 1


def test_a_tenants_mode_is_told_with_its_matches(client):
    prefix, other = prefix_of(tenant="acme"), prefix_of(tenant="other")
    client.put(prefix)
    client.put(other)
    client.admin.SetMode(pb.SetModeRequest(tenant=prefix.tenant, mode="tail"))
    assert client.match(prefix).default_mode == "tail"
    assert client.match(other).default_mode == ""
    client.admin.SetMode(pb.SetModeRequest(tenant=prefix.tenant))
    assert client.match(prefix).default_mode == ""
    code, details = code_of(
        lambda: client.admin.SetMode(pb.SetModeRequest(tenant=prefix.tenant, mode="zero"))
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "mode is 'zero', wanted one of exact, tail, auto, off" in details
