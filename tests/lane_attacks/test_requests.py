"""Clients that mean harm with a lane of their own: what they ask ends theirs, and nobody else's."""

import os
import socket
import tracemalloc

import lane_objects
import pytest
from lane_clients import HIDDEN, assert_well, drip, is_over, opened, serving
from store_objects import Prefix, span_range
from waiting import Clock, until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.lane_wire import (
    MAX_REQUEST_BYTES,
    PLACED,
    REQUEST,
    Pace,
    RecordKind,
    Request,
    receive,
    unpack_record,
)
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire


def test_a_request_that_drips_is_cut_off(servers, prefix):
    request = pb.FetchRequest(namespace=prefix.namespace, leaf=bytes(32)).SerializeToString()
    with serving(servers, stall_limit_s=0.4) as (server, client):
        with opened(client) as sock:
            assert drip(sock, REQUEST.pack(Request.FETCH, 0, 0, len(request)) + request) < 100
        assert_well(server, client)


def put_request(prefix, *items):
    begin = pb.PutBegin(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
    plan = pb.PutPlan(begin=begin, objects=items).SerializeToString()
    return REQUEST.pack(Request.PUT, 0, 0, len(plan)) + plan


def test_an_object_that_drips_is_cut_off_and_claimed_no_longer(servers, prefix):
    first = lane_objects.objects(prefix, prefix.spans(Kind.KV))[0]
    with serving(servers, put_stall_limit_s=0.4) as (server, client):
        used = server.store.stats().pool_used_bytes
        with opened(client) as sock:
            sock.sendall(put_request(prefix, first.announce))
            wanted = unpack_record(receive(sock, 80))
            assert (wanted.kind, receive(sock, 1)) == (RecordKind.WANTED, b"\x01")
            assert drip(sock, b"".join(first.parts)) < 100
        until(lambda: not server.store.catalog._claims)
        assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 0
        assert server.store.stats().pool_used_bytes == used
        assert_well(server, client)


def test_a_slow_sender_may_go_on_as_long_as_its_bytes_come():
    """The pace gives time back for bytes; a pause in a long transfer is no end of it."""
    clock = Clock()
    left, right = socket.socketpair()
    pace = Pace(2.0, clock)
    buffer = memoryview(bytearray(1 << 20))
    with left, right:
        for spent_s in (1.9, 1.9, 1.9):
            left.sendall(bytes(128 << 10))  # two seconds' worth

            class Slow:
                family = right.family

                def settimeout(self, timeout_s):
                    right.settimeout(timeout_s)

                def recvmsg_into(self, buffers, spent_s=spent_s):
                    clock.now_s += spent_s
                    return right.recvmsg_into(buffers)

            assert pace.receive(Slow(), [buffer]) == 128 << 10
        left.sendall(b"x")
        assert pace.receive(Slow(), [buffer]) == 1
        left.sendall(b"x")
        with pytest.raises(TimeoutError, match="sends below"):
            pace.receive(Slow(), [buffer])


@pytest.mark.parametrize("kind", [Request.FETCH, Request.PUT, Request.SEEN, 255])
@pytest.mark.parametrize("size", [MAX_REQUEST_BYTES + 1, (1 << 32) - 1])
def test_a_huge_length_is_refused_before_any_of_it_is_waited_for(servers, kind, size):
    with serving(servers) as (server, client):
        with opened(client) as sock:
            sock.sendall(REQUEST.pack(kind, 255, 0xFFFF, size))
            record = unpack_record(receive(sock, 80))
            assert record.kind is RecordKind.ERROR
            assert str(size) in receive(sock, record.offset).decode()
            assert is_over(sock)
        assert_well(server, client)


def test_a_length_costs_no_memory_before_its_bytes_come(servers):
    with serving(servers) as (_, client), opened(client) as sock:
        tracemalloc.start()
        try:
            sock.sendall(REQUEST.pack(Request.FETCH, 0, 0, MAX_REQUEST_BYTES) + bytes(1 << 16))
            until(lambda: tracemalloc.get_traced_memory()[1] > 1 << 19)
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
        finally:
            tracemalloc.stop()


def test_more_ranges_or_objects_than_any_prefix_has_are_refused(servers, prefix):
    ranges = [span_range(Kind.KV, 0, 700)] * 5000
    fetch_all = pb.FetchRequest(namespace=prefix.namespace, leaf=bytes(32), ranges=ranges)
    data = fetch_all.SerializeToString()
    item = pb.PutObject(kind=1, first_token=0, end_token=256, size_bytes=9000)
    with serving(servers) as (server, client):
        for request, told in (
            (REQUEST.pack(Request.FETCH, 0, 0, len(data)) + data, "5000 ranges"),
            (put_request(prefix, *[item] * ((1 << 17) + 1)), "131073 objects"),
        ):
            with opened(client) as sock:
                sock.sendall(request)
                record = unpack_record(receive(sock, 80))
                assert record.kind is RecordKind.ERROR
                assert told in receive(sock, record.offset).decode()
        assert_well(server, client)


def test_many_long_ranges_are_not_all_held_in_memory(servers, prefix):
    """Each of 4096 ranges has three pieces; they are made as their turn comes, or a bit ahead."""
    ranges = [span_range(Kind.KV, 0, 700)] * 4096
    with serving(servers) as (server, client):
        lane_objects.put(client, prefix)
        leaf = client.match(prefix.namespace, prefix.tokens).leaf
        request = pb.FetchRequest(namespace=prefix.namespace, leaf=leaf, ranges=ranges)
        made = []
        reader = server.store._reader
        pieces = reader._pieces
        reader._pieces = lambda *args: made.append(1) or pieces(*args)
        frames = reader.frames(request)
        next(frames)
        assert len(made) <= 2 * 1400
        frames.close()


def test_out_of_order_requests_end_the_lane_and_its_pins(servers, prefix):
    with serving(servers, stall_limit_s=60) as (server, client):
        lane_objects.put(client, prefix)
        leaf = client.match(prefix.namespace, prefix.tokens).leaf
        data = pb.FetchRequest(
            namespace=prefix.namespace, leaf=leaf, ranges=[HIDDEN]
        ).SerializeToString()
        head = REQUEST.pack(Request.FETCH, PLACED, 0, len(data))
        with opened(client) as sock:
            # A second request where the first one's SEEN is due; over TCP it simply comes next.
            sock.sendall(head + data + head + data)
            if server.address.startswith("unix:"):
                assert is_over(sock)
        assert_well(server, client)


@pytest.mark.parametrize("cut", [1, 7, 8, 60, -1])
def test_a_request_cut_short_by_a_half_closed_lane_is_nothing(servers, prefix, cut):
    data = put_request(prefix, lane_objects.objects(prefix)[0].announce)
    with serving(servers) as (server, client):
        used = server.store.stats().pool_used_bytes
        with opened(client) as sock:
            sock.sendall(data[:cut])
            sock.shutdown(socket.SHUT_WR)
            assert is_over(sock)
        assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 0
        assert server.store.stats().pool_used_bytes == used
        assert_well(server, client)


def test_half_an_object_before_a_half_closed_lane_is_nothing(servers, prefix):
    first = lane_objects.objects(prefix, prefix.spans(Kind.KV))[0]
    data = b"".join(first.parts)
    with serving(servers) as (server, client):
        used = server.store.stats().pool_used_bytes
        with opened(client) as sock:
            sock.sendall(put_request(prefix, first.announce) + data[: len(data) // 2])
            sock.shutdown(socket.SHUT_WR)
            assert is_over(sock)
        until(lambda: not server.store.catalog._claims)
        assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 0
        assert server.store.stats().pool_used_bytes == used
        assert_well(server, client)


def test_a_reader_that_has_half_closed_still_gets_its_rows(servers, prefix):
    with serving(servers) as (server, client):
        lane_objects.put(client, prefix)
        leaf = client.match(prefix.namespace, prefix.tokens).leaf
        data = pb.FetchRequest(
            namespace=prefix.namespace, leaf=leaf, ranges=[span_range(Kind.KV, 0, 5)]
        ).SerializeToString()
        with opened(client) as sock:
            sock.sendall(REQUEST.pack(Request.FETCH, 0, 0, len(data)) + data)
            sock.shutdown(socket.SHUT_WR)
            came = b""
            while chunk := sock.recv(1 << 16):
                came += chunk
        record = unpack_record(came[:80])
        size = record.units * record.rows * record.row_bytes
        assert came[80 : 80 + size] == prefix.rows(Kind.KV, 0, 5)
        assert_well(server, client)


def test_a_reader_that_takes_nothing_is_cut_off(servers):
    """Rows sent, not placed: its pins end with the stall limit, though its lane stays open."""
    wide = Prefix(os.urandom(32), range(1, 20_001))
    with serving(servers, stall_limit_s=0.4) as (server, client):
        lane_objects.put(client, wide, spans=wide.spans(Kind.KV))
        leaf = client.match(wide.namespace, wide.tokens).leaf
        ranges = [span_range(Kind.KV, 0, 20_000)] * 50
        data = pb.FetchRequest(
            namespace=wide.namespace, leaf=leaf, ranges=ranges
        ).SerializeToString()
        with opened(client) as sock:
            sock.sendall(REQUEST.pack(Request.FETCH, 0, 0, len(data)) + data)
            receive(sock, 1)  # its lease is there
            until(lambda: len(server.store.leases) == 0)
            until(lambda: server.store.stats().pinned_bytes == 0)
        assert_well(server, client)
