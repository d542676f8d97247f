"""One client takes what is its own: its streams, its time, and no bytes of anybody else."""

import os
import threading
from contextlib import contextmanager

import grpc
import lane_objects
import pytest
from lane_objects import WAIT_S
from store_objects import Client, Prefix, put_frames, span_range
from tokens_file import bearer, serve_tenants
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import LimitExceeded
from tailreplay.store.objects import Kind

IDS = range(1, 701)
PREFIX = Prefix(bytes(range(32)), IDS)


@contextmanager
def client_of(server, folder, name, **how):
    credentials = bearer(folder, name)
    with StoreClient(
        server.address, credentials=credentials, match_timeout_s=WAIT_S, **how
    ) as client:
        yield client


def test_one_tenant_does_not_take_every_stream(tmp_path):
    gate = threading.Event()
    with (
        serve_tenants(
            tmp_path,
            max_workers=6,  # four streams, two of them for one tenant
            stall_limit_s=60,
            before_rows=lambda _: gate.wait(WAIT_S),
        ) as server,
        client_of(server, tmp_path, "acme", lanes=False) as greedy,
        client_of(server, tmp_path, "rival", lanes=False) as other,
    ):

        def fetch(client, leaf):
            wanted = span_range(Kind.KV, 0, 700)
            return client.fetch(PREFIX.namespace, leaf, [wanted], timeout_s=WAIT_S)

        leaves = {}
        for client in (greedy, other):
            lane_objects.put(client, PREFIX)
            leaves[client] = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        held = [fetch(greedy, leaves[greedy]) for _ in range(2)]
        until(lambda: len(server.store.leases) == 2)
        with pytest.raises(LimitExceeded, match="2 of them your own, wanted fewer than 4 and 2"):
            list(fetch(greedy, leaves[greedy]))
        passes = fetch(other, leaves[other])
        until(lambda: len(server.store.leases) == 3)
        gate.set()
        for stream in (*held, passes):
            assert len(list(stream)) > 1


def test_a_put_that_drips_is_cut_off_over_grpc_as_well():
    with serve_in_thread(put_stall_limit_s=0.4) as server:
        client = Client(server.address)
        pause = threading.Event()
        sent = []

        def drip():
            begin, announce, chunk = list(put_frames(PREFIX, chunk_bytes=1 << 20))[:3]
            yield begin
            yield announce
            for byte in chunk.chunk[:400]:
                sent.append(byte)
                yield pb.PutFrame(chunk=bytes([byte]))
                pause.wait(0.05)

        with pytest.raises(grpc.RpcError) as caught:
            client.stub.Put(drip(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(sent) < 100
        until(lambda: not server.store.catalog._claims)
        assert server.store.stats().pool_used_bytes == 0
        client.close()


@pytest.mark.parametrize("lanes", [True, False])
def test_recycled_memory_shows_nothing_of_whoever_had_it_before(tmp_path, lanes):
    """A rival gets the very memory that acme's objects lay in, and reads all that it can."""
    with (
        serve_tenants(tmp_path, pool_bytes=8 << 20) as server,
        client_of(server, tmp_path, "acme", lanes=lanes) as acme,
        client_of(server, tmp_path, "rival", lanes=lanes) as rival,
    ):
        store = server.store
        while True:  # fills the pool, over and over its first objects
            secret = Prefix(PREFIX.namespace, [int.from_bytes(os.urandom(3)), *IDS])
            lane_objects.put(acme, secret)
            if store.stats().evicted_bytes:
                break
        space = server._access.bearer("token-acme").scoped(PREFIX.namespace)
        for tenant in store.admin.operators.list_tenants(pb.ListTenantsRequest()).tenants:
            store.admin.forgetter.clear(pb.ClearRequest(tenant=tenant.tenant))
        assert store.stats().pool_used_bytes == 0
        assert space not in {n.namespace for n in store.describe().namespaces if n.blocks}
        # Objects that break off, or say that they are longer than what was sent, are never there.
        half = put_frames(PREFIX, [(Kind.KV, 0, 256)], chunk_bytes=1000)
        with pytest.raises(grpc.RpcError):
            _raw_put(server, tmp_path, [frame for _, frame in zip(range(4), half, strict=False)])
        assert rival.match(PREFIX.namespace, PREFIX.tokens).matched_tokens == 0
        # Of those that are, each byte that comes back is the rival's own.
        lane_objects.put(rival, PREFIX)
        state = PREFIX.chain.prefix_hash(700)
        wanted = [
            span_range(Kind.KV, 0, 700),
            span_range(Kind.HIDDEN, 0, 700),
            span_range(Kind.CHECKPOINT, 699, 700, prefix_hash=state),
        ]
        rows, ends = lane_objects.fetch(rival, PREFIX, *wanted)
        assert len(ends) == 3
        assert rows == [lane_objects.rows_of(PREFIX, w) for w in wanted]
        # And where the pool lies it is not told.
        assert rival._open_lane().segment == "" if lanes else True


def _raw_put(server, folder, frames):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put", pb.PutFrame.SerializeToString)
        call(iter(frames), timeout=WAIT_S, metadata=bearer(folder, "rival").metadata())
