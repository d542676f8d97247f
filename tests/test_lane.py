"""The data lane: rows and objects beside gRPC, over a real socket and through shared memory."""

import fcntl
import os
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial

import lane_objects
import numpy as np
import pytest
from lane_objects import WAIT_S
from loopback import free_port
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.lane_stream import LaneStream
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import IntegrityError, InvalidRequest, LimitExceeded, StoreUnavailable
from tailreplay.store.lane_requests import LaneRequests
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    REQUEST,
    VERSION,
    LaneRecord,
    RecordKind,
    Request,
    connect,
    receive,
    unpack_record,
)
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 701))
SPANS = {
    "unaligned kv": span_range(Kind.KV, 0, 613),
    "units of kv": span_range(Kind.KV, 0, 700, first_unit=1, units=2),
    "hidden": span_range(Kind.HIDDEN, 130, 611, first_unit=1, units=1),
    "state": span_range(Kind.CHECKPOINT, 699, 700, prefix_hash=PREFIX.chain.prefix_hash(700)),
}


@pytest.fixture(params=["unix", "tcp"])
def address(request):
    """A Unix socket, where rows are placed in shared memory, or TCP, where they are sent."""
    if request.param == "tcp":
        yield "127.0.0.1:0"
        return
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        yield f"unix://{folder}/store.sock"


@contextmanager
def serving(address, **settings):
    with (
        serve_in_thread(listen=address, **settings) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S) as client,
    ):
        yield server, client


put = partial(lane_objects.put, prefix=PREFIX)
rows_of = partial(lane_objects.rows_of, PREFIX)


def fetch(client, *ranges):
    return lane_objects.fetch(client, PREFIX, *ranges)


def test_rows_come_exactly_as_they_were_put(address):
    with serving(address) as (server, client):
        stored = put(client)
        assert (stored.stored, stored.duplicates) == (len(PREFIX.spans()), 0)
        ranges = list(SPANS.values())
        got, ends = fetch(client, *ranges)
        assert got == [rows_of(wanted) for wanted in ranges]
        assert ends == [(RecordKind.RANGE_END, i) for i in range(len(ranges))]
        assert (server.store.stats().pinned_bytes, len(server.store.leases)) == (0, 0)


def test_placed_rows_are_not_sent_and_sent_rows_are_not_placed(address):
    with serving(address) as (_, client):
        put(client)
        lane = client._lanes.take()
        client._lanes.give_back(lane)
        assert (lane.segment is not None) == address.startswith("unix:")


@pytest.mark.parametrize("end", ["read", "cancel", "close"])
def test_the_segment_is_locked_while_it_is_read_and_free_while_the_engine_idles(end):
    """Whoever gives a dead store's memory back wants it locked by nobody."""
    with serve_in_thread() as server, StoreClient(server.address, match_timeout_s=WAIT_S) as client:
        put(client)
        shm_path = server.store.tiers.shm_path
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        stream = client.fetch(PREFIX.namespace, leaf, [SPANS["hidden"]], timeout_s=WAIT_S)
        assert is_locked(shm_path)
        if end == "cancel":
            stream.cancel()
        else:
            steps = iter(stream)
            next(steps)
            assert is_locked(shm_path)
            list(steps) if end == "read" else steps.close()
        assert not is_locked(shm_path)
        assert len(client._lanes._idle) == (end == "read")


def is_locked(path):
    """Whether anybody has a lock of a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_segment_whose_memory_is_given_back_is_not_read_and_not_waited_for():
    with serve_in_thread() as server, StoreClient(server.address, match_timeout_s=WAIT_S) as client:
        put(client)
        with open(server.store.tiers.shm_path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert fetch(client, SPANS["hidden"])[0] == [rows_of(SPANS["hidden"])]  # over gRPC
            assert client._lanes._idle == []


def test_the_mapping_goes_once_the_store_is_gone():
    with StoreClient(f"unix:///tmp/{os.getpid()}.sock") as client:
        with serve_in_thread(listen=client.address) as server:
            assert client.connect(WAIT_S)
            name = os.path.basename(server.store.tiers.shm_path)
            before = mappings_of(name)
        assert client._lanes.take() is None
        assert mappings_of(name) < before


def mappings_of(name):
    """How often this process has a segment mapped: the store, if it is one of its, and clients."""
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def test_a_reader_that_may_not_map_the_pool_gets_its_rows_sent(monkeypatch):
    """Though it has mapped it: the store alone says who may."""
    monkeypatch.setattr(LaneRequests, "_may_map", lambda *_: False)
    with (
        tempfile.TemporaryDirectory(prefix="tailreplay-") as folder,
        serving(f"unix://{folder}/store.sock") as (_, client),
    ):
        put(client)
        for _ in range(2):
            ranges = list(SPANS.values())
            assert fetch(client, *ranges)[0] == [rows_of(wanted) for wanted in ranges]
        lane = client._lanes.take()
        assert lane.segment is not None
        lane.close()


def test_a_lane_is_used_again(address):
    with serving(address) as (server, client):
        put(client)
        for _ in range(5):
            fetch(client, SPANS["hidden"])
        assert len(server._lane._connections) == 1


def test_as_many_lanes_stay_open_as_were_wanted_at_once(address):
    """Who is the nth at once waits for a lane to be opened, but not the next time."""
    with serving(address) as (_, client):
        put(client)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        assert len(client._lanes._idle) == 1
        first = lanes_of(client, leaf, 3)
        assert len(first) == 3
        assert lanes_of(client, leaf, 3) == first
        assert lanes_of(client, leaf, 2) < first


def lanes_of(client, leaf, count):
    """Which lanes so many fetches at once have; they all end."""
    wanted = [SPANS["hidden"]]
    streams = [client.fetch(PREFIX.namespace, leaf, wanted, timeout_s=WAIT_S) for _ in range(count)]
    lanes = {id(stream._lane) for stream in streams}
    for stream in streams:
        for record, fill in stream:
            if fill is not None:
                fill(np.empty((record.units, record.rows, record.row_bytes), np.uint8))
    return lanes


def test_a_cancel_that_comes_late_leaves_the_lane_to_who_has_it_now(address):
    with serving(address) as (_, client):
        put(client)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        nowhere = [span_range(Kind.HIDDEN, 700, 701)]
        first = client.fetch(PREFIX.namespace, leaf, nowhere, timeout_s=WAIT_S)
        assert [step.record.kind for step in first] == [RecordKind.MISSING]
        second = client.fetch(PREFIX.namespace, leaf, nowhere, timeout_s=WAIT_S)
        assert second._lane is first._lane
        first.cancel()
        assert [step.record.kind for step in second] == [RecordKind.MISSING]


def test_what_the_store_has_is_neither_packed_nor_sent(address):
    packed = []
    with serving(address) as (_, client):
        put(client, spans=PREFIX.spans(Kind.KV))
        answer = put(client, packed=packed)
        assert answer.duplicates == len(PREFIX.spans(Kind.KV))
        assert {kind for kind, _ in packed} == {Kind.HIDDEN, Kind.CHECKPOINT}
        assert answer.stored == len(packed)


def test_a_refused_object_says_why_and_the_others_stay(address):
    def damaged(span):
        data = bytearray(PREFIX.object(*span))
        data[-1] ^= span[1] == 256
        return bytes(data)

    spans = PREFIX.spans(Kind.KV)
    with serving(address) as (server, client):
        with pytest.raises(IntegrityError, match="damaged"):
            put(client, spans=spans, make=damaged)
        assert client.match(PREFIX.namespace, PREFIX.tokens).matched_tokens == 256
        assert put(client, spans=spans).stored == 2
        assert server.store.stats().integrity_errors == 1


def test_refusals_have_the_errors_of_grpc(address):
    huge = ObjectBytes(pb.PutObject(kind=1, first_token=0, end_token=256, size_bytes=1 << 40), ())
    with serving(address) as (_, client):
        put(client)
        with pytest.raises(LimitExceeded, match=str(1 << 40)):
            client.put(PREFIX.namespace, PREFIX.tokens, [huge], timeout_s=WAIT_S)
        with pytest.raises(InvalidRequest, match="32"):
            client.put(bytes(31), PREFIX.tokens, [], timeout_s=WAIT_S)
        with pytest.raises(InvalidRequest, match="first_token < end_token"):
            list(client.fetch(PREFIX.namespace, b"", [span_range(Kind.KV, 5, 5)], timeout_s=WAIT_S))
        assert fetch(client, SPANS["hidden"])[0] == [rows_of(SPANS["hidden"])]


def test_a_lane_that_ended_with_the_store_is_replaced(address):
    if address.endswith(":0"):
        address = f"127.0.0.1:{free_port()}"
    with StoreClient(address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S) as client:
        for _ in range(2):
            with serve_in_thread(listen=address):
                assert client.connect(WAIT_S)
                put(client)
                assert fetch(client, SPANS["state"])[0] == [rows_of(SPANS["state"])]


def test_a_cancelled_fetch_gives_its_pins_back(address):
    reached, gate = threading.Event(), threading.Event()

    def hold(kind):
        reached.set()
        gate.wait(WAIT_S)

    with serving(address, before_rows=hold, stall_limit_s=60) as (server, client):
        put(client)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        stream = client.fetch(PREFIX.namespace, leaf, [SPANS["hidden"]], timeout_s=WAIT_S)
        failed = []

        def read():
            try:
                list(stream)
            except StoreUnavailable as error:
                failed.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert reached.wait(WAIT_S)
        assert server.store.stats().pinned_bytes > 0
        stream.cancel()
        gate.set()
        reader.join(WAIT_S)
        assert failed
    assert len(server.store.leases) == 0
    assert not server._lane._connections


def test_a_lease_shorter_than_a_slow_transfer_is_renewed_by_what_is_taken(tmp_path):
    """Six windows, after each of which the reader rests a fifth of the stall limit."""
    ranges, ends, rest = [SPANS["hidden"], SPANS["unaligned kv"]] * 3, [], threading.Event()
    with serving(f"unix://{tmp_path}/store.sock", stall_limit_s=2.0) as (server, client):
        put(client)
        began = time.monotonic()
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        stream = client.fetch(PREFIX.namespace, leaf, ranges, timeout_s=WAIT_S)
        for record, fill in stream:
            if fill is not None:
                fill(np.empty((record.units, record.rows, record.row_bytes), np.uint8))
            else:
                ends.append(record.number)
                rest.wait(0.4)
        assert ends == list(range(6))
        assert time.monotonic() - began > server.store.leases.stall_limit_s
        assert (server.store.stats().pinned_bytes, len(server.store.leases)) == (0, 0)


def test_rows_that_were_not_pinned_all_the_while_do_not_count():
    """The store takes a window back from a reader that is too slow, and the reader notices."""
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        address = f"unix://{folder}/store.sock"
        with serving(address, stall_limit_s=0.2) as (server, client):
            put(client)
            leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
            steps = iter(client.fetch(PREFIX.namespace, leaf, [SPANS["hidden"]], timeout_s=WAIT_S))
            record, fill = next(steps)
            until(lambda: not server.store.stats().pinned_bytes)  # the stall limit ends it
            fill(np.empty((record.units, record.rows, record.row_bytes), np.uint8))
            with pytest.raises(StoreUnavailable, match="took its memory back"):
                list(steps)  # no end of the range before that


def test_only_a_fresh_ticket_opens_a_lane(address):
    with serving(address) as (server, client):
        answer = client._open_lane()
        where = answer.address
        if where.startswith(":"):
            where = server.address.rpartition(":")[0] + where
        for ticket, opens in ((bytes(32), False), (answer.ticket, True), (answer.ticket, False)):
            with connect(where, WAIT_S) as sock:
                sock.sendall(HELLO.pack(MAGIC, VERSION, 0, ticket))
                assert (unread(sock) == b"\x01") == opens


def unread(sock):
    """The answer to a greeting; empty when the lane was closed, ERROR or not."""
    data = sock.recv(1)
    return data if data == b"\x01" else b""


@pytest.mark.parametrize(
    "garbage",
    [
        REQUEST.pack(9, 0, 0, 0),
        REQUEST.pack(Request.FETCH, 0, 0, 1 << 31),
        REQUEST.pack(Request.FETCH, 0, 0, 5) + b"\xff" * 5,
        REQUEST.pack(Request.SEEN, 0, 0, 0),
    ],
)
def test_garbage_ends_the_lane_with_a_reason_and_nothing_else(address, garbage):
    with serving(address) as (server, client):
        lane = client._lanes.take()
        lane.sock.settimeout(WAIT_S)
        lane.sock.sendall(garbage)
        record = unpack_record(receive(lane.sock, 80))
        assert record.kind is RecordKind.ERROR
        assert receive(lane.sock, record.offset)
        assert lane.sock.recv(1) == b""
        lane.close()
        put(client)
        assert fetch(client, SPANS["state"])[0] == [rows_of(SPANS["state"])]
        assert len(server.store.leases) == 0


def test_without_lanes_payload_goes_through_grpc(address):
    with serving(address, max_lanes=0) as (_, client):
        assert put(client).stored == len(PREFIX.spans())
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        steps = client.fetch(PREFIX.namespace, leaf, [SPANS["hidden"]], timeout_s=WAIT_S)
        assert not isinstance(steps, LaneStream)
        assert [s.record.kind for s in steps][-1] is RecordKind.RANGE_END


def test_the_socket_of_the_lane_is_private_and_goes_with_the_store():
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        with serve_in_thread(listen=f"unix://{folder}/store.sock"):
            assert os.stat(f"{folder}/store.sock.lane").st_mode & 0o777 == 0o600
        assert not os.path.exists(f"{folder}/store.sock.lane")


def test_record_has_its_golden_bytes():
    record = LaneRecord(RecordKind.ROWS, 2, 1, 7, 3, 4, 5, 6, 7, 8, 9, 10, bytes(range(32)))
    assert record.pack().hex() == (
        "01010700020000000300000004000000050000000600000007000000080000000900000000000000"
        "0a00000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    assert unpack_record(record.pack()) == record
