"""Clients that mean harm: what they do to a lane ends their own, and nobody else's."""

import os
import resource
import socket
import threading
import time
import tracemalloc
from contextlib import ExitStack, closing, contextmanager

import lane_objects
import pytest
from lane_objects import WAIT_S
from store_objects import Prefix, span_range
from waiting import Clock, until

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.auth import ANYONE, Principal, Role
from tailreplay.store.errors import NotAuthenticated
from tailreplay.store.lane_tickets import Client, Tickets, _host
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    MAX_REQUEST_BYTES,
    PLACED,
    REQUEST,
    VERSION,
    Pace,
    RecordKind,
    Request,
    connect,
    receive,
    unpack_record,
)
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire

IDS = range(1, 701)
HIDDEN = span_range(Kind.HIDDEN, 130, 611, first_unit=1, units=1)


@pytest.fixture(scope="module", params=["unix", "tcp"])
def servers(request):
    """Gives a server with some settings; tests with the same settings share it."""
    running = {}
    with ExitStack() as stack:

        def get(**settings):
            key = tuple(sorted(settings.items()))
            if key not in running:
                if request.param == "tcp":
                    settings["listen"] = "127.0.0.1:0"
                running[key] = stack.enter_context(serve_in_thread(**settings))
            return running[key]

        yield get


@contextmanager
def serving(servers, **settings):
    server = servers(**settings)
    with StoreClient(server.address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S) as client:
        yield server, client


@pytest.fixture
def prefix():
    """One that nobody has stored."""
    return Prefix(os.urandom(32), IDS)


def where(server):
    lane = server._lane.address
    return server.address.rpartition(":")[0] + lane if lane.startswith(":") else lane


@contextmanager
def raw(server):
    """A connection to the lane's door, with no ticket shown yet."""
    with connect(where(server), WAIT_S) as sock:
        yield sock


@contextmanager
def opened(client):
    """A lane of a client, to be used by hand."""
    lane = client._lanes.take()
    lane.sock.settimeout(WAIT_S)
    with closing(lane):
        yield lane.sock


def is_over(sock):
    """Whether the store has ended a lane, whatever it said before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def assert_well(server, client):
    """Whoever plays by the rules is served, and nothing is left over."""
    prefix = Prefix(os.urandom(32), IDS)
    assert lane_objects.put(client, prefix).stored == len(prefix.spans())
    rows, _ = lane_objects.fetch(client, prefix, HIDDEN)
    assert rows == [lane_objects.rows_of(prefix, HIDDEN)]
    until(lambda: server.store.stats().pinned_bytes == 0)
    assert len(server.store.leases) == 0
    assert not server.store.catalog._claims


def test_the_door_stays_open_when_descriptors_run_out(servers):
    with serving(servers) as (server, client):
        family = socket.AF_UNIX if server.address.startswith("unix:") else socket.AF_INET
        crowd = [socket.socket(family, socket.SOCK_STREAM) for _ in range(20)]
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(s.fileno() for s in crowd) + 2, hard))
        try:
            for sock in crowd:
                sock.settimeout(WAIT_S)
                host, _, port = where(server).rpartition(":")
                unix = family == socket.AF_UNIX
                sock.connect(where(server).removeprefix("unix://") if unix else (host, int(port)))
            until(lambda: any(is_hung_up(sock) for sock in crowd))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            for sock in crowd:
                sock.close()
        assert_well(server, client)
        assert server._lane._acceptor.is_alive()


def is_hung_up(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_hung_up_after(sock):
    """Whether the end comes before any byte does."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_a_crowd_without_tickets_keeps_nobody_out(servers):
    with serving(servers, stall_limit_s=60, max_lanes=4) as (server, client):
        crowd = [connect(where(server), WAIT_S) for _ in range(200)]
        try:
            assert_well(server, client)
            assert len(server._lane._waiting) <= 64
            assert len(server._lane._connections) <= 4
        finally:
            for sock in crowd:
                sock.close()


def drip(sock, data, pause_s=0.05):
    """Sends a byte at a time until it is cut off; how many went."""
    pause = threading.Event()
    for sent in range(len(data)):
        try:
            sock.sendall(data[sent : sent + 1])
        except OSError:
            return sent
        pause.wait(pause_s)
    return len(data)


def test_a_greeting_that_drips_is_cut_off(servers):
    with serving(servers, stall_limit_s=0.4) as (server, client):
        hello = HELLO.pack(MAGIC, VERSION, 0, bytes(32))
        with raw(server) as sock:
            assert drip(sock, hello) < len(hello)
        assert not server._lane._waiting
        assert_well(server, client)


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
            until(lambda: len(server.store.leases) == 1)
            until(lambda: len(server.store.leases) == 0)
            until(lambda: server.store.stats().pinned_bytes == 0)
        assert_well(server, client)


def test_another_protocol_at_the_door_gets_no_answer(servers):
    with serving(servers) as (server, client):
        good = client._open_lane().ticket
        for hello in (
            b"GET / HTTP/1.1\r\nHost: store\r\nAccept: */*\r\n\r\n",
            HELLO.pack(b"TRLM", VERSION, 0, good),
            HELLO.pack(MAGIC, VERSION + 1, 0, good),
        ):
            with raw(server) as sock:
                sock.sendall(hello)
                assert is_hung_up_after(sock)
        assert_well(server, client)


TENANT = Principal(Role.TENANT, "acme", token_digest=b"t")


def test_a_ticket_is_for_one_client_once_and_soon(clock):
    tickets = Tickets(clock)
    here, there = Client("10.0.0.1"), Client("10.0.0.2")
    ticket = tickets.issue(here, TENANT)
    for client in (there, here):  # shown by another, it is gone for its owner as well
        with pytest.raises(NotAuthenticated):
            tickets.redeem(ticket, client)
    ticket = tickets.issue(here, TENANT)
    assert tickets.redeem(ticket, here) is TENANT
    for age_s in (9.9, 10.0):
        ticket = tickets.issue(here, TENANT)
        clock.now_s += age_s
        if age_s < 10:
            assert tickets.redeem(ticket, here) is TENANT
            continue
        with pytest.raises(NotAuthenticated):
            tickets.redeem(ticket, here)


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0"])
def test_a_client_is_the_same_by_each_of_this_machines_addresses(listen, prefix):
    """gRPC may take ::1 where the lane takes 127.0.0.1."""
    with (
        serve_in_thread(listen=listen) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        lane_objects.put(client, prefix)
        with opened(client) as sock:  # there is one
            assert sock.fileno() >= 0


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("[fe80::1%eth0]", "fe80::1"),
        ("::1", "loopback"),
        ("127.0.0.9", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
    ],
)
def test_a_hosts_address_has_one_spelling(text, host):
    assert _host(text) == host


def test_who_asks_for_many_tickets_loses_its_own(clock):
    tickets = Tickets(clock)
    mine = tickets.issue(Client("10.0.0.1"), ANYONE)
    greedy = Client("10.0.0.2")
    taken = [tickets.issue(greedy, ANYONE) for _ in range(500)]
    assert len(tickets._tickets) == 129
    assert tickets.redeem(mine, Client("10.0.0.1")) is ANYONE
    assert tickets.redeem(taken[-1], greedy) is ANYONE
    with pytest.raises(NotAuthenticated):
        tickets.redeem(taken[0], greedy)


def test_lanes_close_with_the_store_whatever_their_clients_do(servers):
    with serving(servers, stall_limit_s=60) as (server, client):
        socks = [connect(where(server), WAIT_S) for _ in range(5)]
        socks += [client._lanes.take().sock for _ in range(3)]
        socks[-1].sendall(b"\x01")
        started = time.monotonic()
        server._lane.close()
        assert time.monotonic() - started < 10
        for sock in socks:
            assert is_over(sock)
            sock.close()
