"""Clients of a lane that do not play by the rules, and one that does."""

import os
import threading
from contextlib import closing, contextmanager

import lane_objects
from lane_objects import WAIT_S
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind

IDS = range(1, 701)
HIDDEN = span_range(Kind.HIDDEN, 130, 611, first_unit=1, units=1)


@contextmanager
def serving(servers, **settings):
    server = servers(**settings)
    with StoreClient(server.address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S) as client:
        yield server, client


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
    until(lambda: is_served(client))
    until(lambda: server.store.stats().pinned_bytes == 0)
    assert len(server.store.leases) == 0
    assert not server.store.catalog._claims


def is_served(client):
    """Whether what is put comes back; on a busy machine a good client may be too slow for once."""
    prefix = Prefix(os.urandom(32), IDS)
    try:
        stored = lane_objects.put(client, prefix).stored
        rows, _ = lane_objects.fetch(client, prefix, HIDDEN)
    except StoreUnavailable:
        return False
    assert (stored, rows) == (len(prefix.spans()), [lane_objects.rows_of(prefix, HIDDEN)])
    return True


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
