"""Objects put through a staging segment: never what the writer writes later, never a SIGBUS."""

import fcntl
import mmap
import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_objects import WAIT_S, fetch, objects, put, rows_of
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.connector.staging import StagingRing
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.lane_wire import REQUEST, STAGED, RecordKind, Request, receive
from tailreplay.store.objects import Kind
from tailreplay.store.put_source import OFFSET
from tailreplay.store.staging import Staging
from tailreplay.store.tokens import to_wire

PREFIX = Prefix(bytes(range(32)), range(1, 701))
WHOLE = (span_range(Kind.KV, 0, 700), span_range(Kind.HIDDEN, 0, 700))
SMALL = 20_000
"""Bytes of a segment that takes some of the objects, and not the largest."""


@pytest.fixture(scope="module", params=[1 << 20, SMALL, 0], ids=["all fit", "some fit", "none"])
def server(request):
    with serve_in_thread(staging_bytes=request.param, put_stall_limit_s=60) as server:
        yield server


@pytest.fixture
def client(server):
    with StoreClient(server.address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def prefix():
    return Prefix(os.urandom(32), range(1, 701))


def whole(client, prefix):
    return fetch(client, prefix, *WHOLE)[0] == [rows_of(prefix, wanted) for wanted in WHOLE]


def test_objects_come_as_they_were_put_whatever_fits(server, client, prefix):
    answer = put(client, prefix)
    assert (answer.stored, answer.dropped) == (len(prefix.spans()), 0)
    assert whole(client, prefix)
    size = server.store.config.staging_bytes
    assert len(server._lane._requests._stagings) == bool(size)
    again = put(client, prefix)
    assert (again.stored, again.duplicates) == (0, len(prefix.spans()))


def test_a_refused_object_says_why_and_the_rest_is_taken(server, client, prefix):
    def damaged(span):
        data = bytearray(prefix.object(*span))
        data[-1] ^= span == (Kind.KV, 256, 512)
        return bytes(data)

    with pytest.raises(IntegrityError, match="damaged"):
        put(client, prefix, make=damaged)
    assert put(client, prefix).stored == len(prefix.spans()) - 1
    assert whole(client, prefix)


def test_a_pool_without_room_drops_and_goes_on(prefix):
    with (
        serve_in_thread(pool_bytes=4 << 20, staging_bytes=1 << 20) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        huge = pb.PutObject(kind=pb.KIND_KV, first_token=0, end_token=256, size_bytes=5 << 20)
        item = ObjectBytes(huge, [bytes(5 << 20)])
        other = Prefix(os.urandom(32), range(1, 701))
        answer = client.put(other.namespace, other.tokens, [item], timeout_s=WAIT_S)
        assert answer.dropped == 1
        assert put(client, other).stored == len(other.spans())


def test_what_the_writer_writes_after_the_check_is_not_stored(prefix):
    """A writer that changes a segment all the time stores whole objects, or is refused."""
    stop = threading.Event()
    with (
        serve_in_thread(staging_bytes=1 << 20) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        put(client, Prefix(os.urandom(32), range(1, 100)))
        lane = client._lanes.take()
        client._lanes.give_back(lane)
        scribbled = lane._staging._bytes

        def scribble():
            draw = np.random.default_rng(1)
            while not stop.is_set():
                scribbled[int(draw.integers(0, len(scribbled)))] ^= 0xFF

        writer = threading.Thread(target=scribble)
        writer.start()
        try:
            for _ in range(5):
                try:
                    put(client, prefix)
                except IntegrityError:
                    continue
                break
        finally:
            stop.set()
            writer.join()
        put(client, prefix)
        assert whole(client, prefix)


def test_a_segment_can_be_neither_cut_nor_grown_nor_unsealed():
    staging = Staging(1 << 16)
    for size in (0, 1 << 10, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(staging.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(staging.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    staging.close()
    staging.close()


def test_holes_read_as_zeros_and_places_outside_are_refused():
    staging = Staging(1 << 16)
    with mmap.mmap(staging.fd, 1 << 16) as writer:
        writer[:] = b"\x01" * (1 << 16)
    target = memoryview(bytearray(1 << 12))
    staging.copy_out((1 << 16) - len(target), target)
    assert bytes(target) == b"\x01" * len(target)
    for offset in ((1 << 16) - len(target) + 1, 1 << 16, 1 << 63, (1 << 64) - 2):
        with pytest.raises(InvalidRequest, match="staging segment"):
            staging.copy_out(offset, target)
    staging.close()


def test_a_place_outside_the_segment_ends_the_lane_alone(prefix):
    with (
        serve_in_thread(staging_bytes=SMALL) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        for offset in (SMALL, 1 << 40, (1 << 64) - 2):
            put(client, Prefix(os.urandom(32), range(1, 100)))
            lane = client._lanes.take()
            plan = pb.PutPlan(
                begin=pb.PutBegin(namespace=prefix.namespace, tokens=to_wire(prefix.tokens)),
                objects=[objects(prefix)[0].announce],
            )
            lane.request(Request.PUT, plan, STAGED)
            assert receive(lane.sock, lane._expect(RecordKind.WANTED, 1)) == b"\x01"
            lane.sock.sendall(OFFSET.pack(offset))
            with pytest.raises(InvalidRequest, match="staging segment"):
                lane.record()
            lane.close()
            until(lambda: not server._lane._requests._stagings)
        assert put(client, prefix).stored == len(prefix.spans())


def test_a_staged_put_without_a_segment_is_refused(client, prefix):
    lane = client._lanes.take()
    plan = pb.PutPlan(begin=pb.PutBegin(namespace=prefix.namespace, tokens=to_wire(prefix.tokens)))
    lane.request(Request.PUT, plan, STAGED)
    with pytest.raises(InvalidRequest, match="no staging segment"):
        lane.record()
    lane.close()


def test_segments_have_their_share_of_the_pool_and_go_with_their_lanes():
    with serve_in_thread(pool_bytes=64 << 20, staging_bytes=2 << 20) as server:
        clients = [StoreClient(server.address, match_timeout_s=WAIT_S) for _ in range(4)]
        for client in clients:
            put(client, Prefix(os.urandom(32), range(1, 300)))
        assert len(server._lane._requests._stagings) == 2
        clients[0].close()
        until(lambda: len(server._lane._requests._stagings) < 2)
        late = StoreClient(server.address, match_timeout_s=WAIT_S)
        put(late, Prefix(os.urandom(32), range(1, 300)))
        assert len(server._lane._requests._stagings) == 2
        for client in [*clients[1:], late]:
            client.close()


def test_asking_twice_gives_none_and_over_tcp_none_at_all():
    with serve_in_thread(listen="127.0.0.1:0") as server, StoreClient(server.address) as client:
        put(client, PREFIX)
        lane = client._lanes.take()
        assert lane._staging is None
        lane.sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
        assert lane._expect(RecordKind.SEGMENT, 0) == 0
        lane.close()
    with (
        serve_in_thread(staging_bytes=1 << 20) as server,
        StoreClient(server.address) as client,
    ):
        put(client, PREFIX)
        lane = client._lanes.take()
        lane.sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
        data, descriptors, _, _ = socket.recv_fds(lane.sock, 80, 1)
        assert (len(data), descriptors) == (80, [])
        lane.close()


@given(st.lists(st.integers(1, 700), max_size=60))
@settings(deadline=None, max_examples=60)
def test_objects_in_a_ring_never_lie_on_one_another(sizes):
    memory = mmap.mmap(-1, 2000)
    ring = StagingRing(memory)
    waiting = []
    for number, size in enumerate(sizes):
        data = bytes([number % 251]) * size
        while (offset := ring.place([data[:3], data[3:]])) is None:
            place, expected = waiting.pop(0)
            assert memory[place : place + len(expected)] == expected
            ring.taken()
        waiting.append((offset, data))
    for place, expected in waiting:
        assert memory[place : place + len(expected)] == expected
