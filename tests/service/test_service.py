"""What the service tells of itself and of what it has done."""

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from service_calls import BASE, HIDDEN, KV, MIB, announced, begin
from store_objects import Client, Prefix, runs_of, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind
from tailreplay.store.server import SERVICE_NAME, StoreServer


def test_releasing_a_lease_that_never_was_is_no_error(client):
    for lease_id in (b"", b"x" * 16):
        client.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=20)


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
def test_health_answers(client, name):
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=20)
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


def test_figures_add_up(client, prefix):
    before = client.stats()
    client.match(prefix)
    put = client.put(prefix)
    client.match(Prefix(prefix.namespace, [*BASE[:300], 5_000_000]))
    fetched = client.fetch(prefix, span_range(KV, 0, 1000))
    after = client.stats()
    for stats in (before, after):
        assert stats.lookups == stats.hits + stats.misses
        assert stats.queried_tokens == stats.matched_tokens + stats.unmatched_tokens
    # The fetch looked its leaf up.
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 1)
    assert after.queried_tokens - before.queried_tokens == 1000 + 301 + 1000
    assert after.matched_tokens - before.matched_tokens == 300 + 1000
    assert after.stored_bytes - before.stored_bytes == put.stored_bytes
    assert after.served_bytes - before.served_bytes == len(fetched.rows[0])
    listed = {(t.tier, t.kind): (t.objects, t.bytes) for t in after.tiers}
    sizes = {kind: listed[pb.TIER_CPU, kind] for kind in Kind}
    assert sum(size for _, size in sizes.values()) <= after.pool_used_bytes <= after.pool_bytes
    assert (after.redis_pending_bytes, after.redis_healthy) == (0, False)


def test_the_store_describes_itself(server, client, prefix):
    client.put(prefix)
    answer = client.stub.Describe(pb.DescribeRequest(), timeout=20)
    assert set(StoreConfig.model_fields) <= set(answer.settings)
    assert answer.settings["effective_pool_bytes"] == str(server.store.tiers.pool_bytes)
    assert answer.boot_id == client.match(prefix).boot_id
    (ours,) = [space for space in answer.namespaces if space.namespace == prefix.namespace]
    assert (ours.blocks, ours.tokens) == (4, 1000)
    assert (ours.kv_bytes_per_token, ours.hidden_bytes_per_token) == (4 * 32, 2 * 32)
    assert ours.checkpoint_bytes == 6 * 208


def test_a_small_pool_takes_several_times_its_size_and_keeps_what_was_used_last(space):
    with serve_in_thread(pool_bytes=4 * MIB) as small:
        client = Client(small.address)
        prefixes = [Prefix(space, [i, *BASE[1:]]) for i in range(80)]
        for prefix in prefixes:
            answer = client.put(prefix)
            assert (answer.stored, answer.dropped) == (21, 0)
            stats = client.stats()
            assert stats.pool_used_bytes <= stats.pool_bytes
        assert stats.stored_bytes > 2 * stats.pool_bytes
        assert stats.evicted_bytes > stats.pool_bytes
        kinds = (KV, HIDDEN)
        fetched = client.fetch(prefixes[-1], *(span_range(kind, 0, 1000) for kind in kinds))
        assert fetched.rows == {i: prefixes[-1].rows(kind, 0, 1000) for i, kind in enumerate(kinds)}
        # What is left of the oldest that is not quite gone is its beginning.
        for prefix in prefixes:
            runs = runs_of(client.match(prefix), KV)
            assert runs in ([], [(0, 256)], [(0, 512)], [(0, 768)], [(0, 1000)])
        # More than the pool can hold is dropped, and costs nobody their bytes.
        used = client.stats().pool_used_bytes
        size = 5 * MIB
        frames = [begin(Prefix(space, BASE)), announced(KV, 0, 256, size)]
        chunks = [pb.PutFrame(chunk=bytes(MIB))] * 5
        assert client.stub.Put(iter([*frames, *chunks]), timeout=20).dropped == 1
        assert client.stats().dropped_objects == 1
        assert client.stats().pool_used_bytes == used
        client.close()


def test_two_stores_on_any_port_do_not_exclude_each_other_and_files_are_left_alone(tmp_path):
    with (
        serve_in_thread(listen="127.0.0.1:0", pool_bytes=4 * MIB) as one,
        serve_in_thread(listen="127.0.0.1:0", pool_bytes=4 * MIB) as other,
    ):
        assert one.address != other.address
        for running in (one, other):
            client = Client(running.address)
            assert client.stats().pool_bytes == 4 * MIB
            client.close()
    precious = tmp_path / "precious"
    precious.write_text("text")
    with pytest.raises(StoreUnavailable, match="it is no socket"):
        StoreServer(StoreConfig(listen=f"unix://{precious}", pool_bytes=4 * MIB))
    assert precious.read_text() == "text"


def test_passwords_are_neither_described_nor_in_errors():
    with pytest.raises(ValueError, match="redis_url") as caught:
        StoreConfig(listen="127.0.0.1:0", redis_url="http://:secret@host")
    assert "secret" not in str(caught.value)
