"""Streams that stall, leave or take more than their share."""

import os
import threading

import grpc
import pytest
from service_calls import BASE, KV, MIB, announced, code_of
from store_objects import Client, Prefix, span_range
from waiting import Clock, until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.geometry import Dtype, kv_geometry
from tailreplay.store.tokens import to_wire


def big_prefix(space: bytes) -> Prefix:
    """Rows of 8 KiB in one block of 2 MiB, far more than a connection buffers."""
    wide = {KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=256, dtype=Dtype.FLOAT32)}
    return Prefix(space, range(256 * 6), wide)


@pytest.fixture(scope="module")
def stern():
    """A server whose clock stands until it is told, and its client."""
    clock = Clock()
    with serve_in_thread(pool_bytes=32 * MIB, stall_limit_s=0.3, clock=clock) as running:
        client = Client(running.address)
        yield running.store, client, clock
        client.close()


def test_a_reader_that_stalls_is_cut_off_and_pins_nothing(stern, space):
    store, client, clock = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    assert next(stream).lease.stall_limit_ms == 300
    next(stream)
    assert store.tiers.pinned_bytes > 0
    # Again and again, since the store may still be offering it what a connection buffers.
    until(lambda: clock.step(0.4) or not len(store.leases))
    until(lambda: store.tiers.pinned_bytes == 0)
    code, _ = code_of(lambda: list(stream))
    assert code is grpc.StatusCode.CANCELLED


def silent_put(client, prefix, gate):
    """A Put that announces an object and sends none of it until the gate opens."""

    def frames():
        yield pb.PutFrame(
            begin=pb.PutBegin(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
        )
        yield announced(KV, 0, 256)
        gate.wait(20)

    return client.stub.Put.future(frames(), timeout=20)


def test_a_writer_that_sends_nothing_is_cut_off_and_holds_nothing(space):
    gate = threading.Event()
    with serve_in_thread(put_stall_limit_s=0.2, pool_bytes=4 * MIB) as server:
        client = Client(server.address)
        prefix = Prefix(space, BASE)
        used = client.stats().pool_used_bytes
        code, _ = code_of(silent_put(client, prefix, gate).result)
        assert code is grpc.StatusCode.CANCELLED
        gate.set()
        until(lambda: server.store.tiers.used_bytes == used)
        assert client.put(prefix, prefix.spans(KV)).stored == 4
        client.close()


def test_lookups_are_answered_whatever_streams_do(space):
    gate = threading.Event()
    prefix = Prefix(space, BASE)
    with serve_in_thread(max_workers=4) as server:
        client = Client(server.address)

        def refused() -> str:
            try:
                client.put(prefix, [])
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            return ""

        held = [silent_put(client, Prefix(space, [i, *BASE]), gate) for i in range(3)]
        until(refused)
        assert refused().startswith("RESOURCE_EXHAUSTED: 3 streams are open, 3 of them")
        assert client.match(prefix).matched_tokens == 0
        gate.set()
        for put in held:
            assert code_of(put.result)[0] is grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: not refused())
        client.close()


def test_a_reader_that_leaves_pins_nothing(stern, space):
    store, client, _ = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    next(stream)
    next(stream)
    stream.cancel()
    until(lambda: len(store.leases) == 0)
    until(lambda: store.tiers.pinned_bytes == 0)


def test_readers_together_pin_no_more_than_their_share(stern):
    store, client, _ = stern
    prefixes = [big_prefix(os.urandom(32)) for _ in range(2)]
    for prefix in prefixes:
        client.put(prefix, prefix.spans(KV))
    streams = [
        client.open_fetch(prefix, span_range(KV, *part))
        for prefix in prefixes
        for part in ((0, 1024), (1024, 1536))  # windows of 8 and 4 MiB
    ]
    pinned = []
    for stream in streams:  # each takes its lease, and then no more
        next(stream)
    until(lambda: pinned.append(store.tiers.pinned_bytes) or max(pinned) > 8 * MIB)
    for stream in streams:
        stream.cancel()
    until(lambda: pinned.append(store.tiers.pinned_bytes) or not pinned[-1])
    assert max(pinned) <= store.tiers.pool_bytes * store.config.leased_share


def test_an_early_release_ends_the_stream(stern, space):
    store, client, _ = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    lease_id = next(stream).lease.lease_id
    client.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=20)
    assert "range_end" not in {frame.WhichOneof("frame") for frame in stream}
    until(lambda: store.tiers.pinned_bytes == 0)
    assert client.stats().leases == 0
