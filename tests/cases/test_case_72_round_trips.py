"""LMCache#1639: time to the first token grew with the round trip, and with the prompt's length."""

import time
from contextlib import closing

import pytest
from case_helpers import STORE, ask, assert_reused, prompt, replica
from store_objects import Client, Prefix, span_range
from tcp_proxy import TcpProxy

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

WAY_S = 0.05


@pytest.fixture
def server():
    with serve_in_thread(listen="127.0.0.1:0", max_lanes=0, **STORE) as server:
        yield server


@pytest.fixture
def far_address(server):
    """The store, as one sees it from 100 ms away."""
    with closing(TcpProxy(int(server.address.rpartition(":")[2]), WAY_S)) as proxy:
        yield f"127.0.0.1:{proxy.port}"


@pytest.mark.model
@pytest.mark.parametrize("length", [150, 2500])
def test_a_hit_takes_two_round_trips_whatever_its_length(server, far_address, length):
    tokens = prompt(length, 72)
    with replica(server.address) as near, replica(far_address) as far:
        ask(near, tokens)
        report = ask(far, tokens).report
        assert_reused(report, length - 1)
        assert report["rpcs"] == 2


def test_a_fetch_from_afar_pays_the_way_once(server, far_address):
    """Of 10 ranges and 2,000 tokens too: what is not asked for one by one does not add up."""
    prefix = Prefix(bytes([72]) * 32, list(range(2000)))
    ranges = [span_range(Kind.HIDDEN, 200 * i, 200 * (i + 1)) for i in range(9)]
    ranges.append(span_range(Kind.KV, 0, 2000))
    took = {}
    with closing(Client(server.address)) as near, closing(Client(far_address)) as far:
        near.put(prefix)
        leaf = near.match(prefix).leaf
        for name, client in (("near", near), ("far", far)):
            client.match(prefix)  # connected
            seconds = []
            for _ in range(5):
                began = time.perf_counter()
                assert not client.fetch(prefix, *ranges, leaf=leaf).missing
                seconds.append(time.perf_counter() - began)
            took[name] = min(seconds)
    assert took["far"] >= 2 * WAY_S
    assert took["far"] - took["near"] < 3.5 * 2 * WAY_S
