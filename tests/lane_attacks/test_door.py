"""Clients that mean harm before they are let in: what they do keeps nobody else out."""

import resource
import socket
import time
from contextlib import contextmanager

import lane_objects
import pytest
from lane_clients import assert_well, drip, is_over, opened, serving
from lane_objects import WAIT_S
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.auth import ANYONE, Principal, Role
from tailreplay.store.errors import NotAuthenticated
from tailreplay.store.lane_tickets import Client, Tickets, _host
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    VERSION,
    connect,
)


def where(server):
    lane = server._lane.address
    return server.address.rpartition(":")[0] + lane if lane.startswith(":") else lane


@contextmanager
def raw(server):
    """A connection to the lane's door, with no ticket shown yet."""
    with connect(where(server), WAIT_S) as sock:
        yield sock


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


def test_a_greeting_that_drips_is_cut_off(servers):
    with serving(servers, stall_limit_s=0.4) as (server, client):
        hello = HELLO.pack(MAGIC, VERSION, 0, bytes(32))
        with raw(server) as sock:
            assert drip(sock, hello) < len(hello)
        assert not server._lane._waiting
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
        lanes = [client._lanes.take() for _ in range(3)]
        socks += [lane.sock for lane in lanes]
        socks[-1].sendall(b"\x01")
        started = time.monotonic()
        server._lane.close()
        assert time.monotonic() - started < 10
        for sock in socks:
            assert is_over(sock)
            sock.close()
        for lane in lanes:
            lane.close()
