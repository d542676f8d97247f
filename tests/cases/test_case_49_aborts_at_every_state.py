"""vllm#44100, sglang PR 40334: requests that ended between lookup and load left locks behind."""

import itertools
import threading

import pytest
from lane_objects import WAIT_S, fetch, objects, put, rows_of
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGES = (span_range(Kind.HIDDEN, 130, 611), span_range(Kind.KV, 0, 613))


class Aborted(Exception):
    """The request has ended."""


def after_steps(client, count):
    """Fetches and leaves after so many steps."""
    leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
    stream = client.fetch(PREFIX.namespace, leaf, RANGES, timeout_s=WAIT_S)
    list(itertools.islice(stream, count))
    stream.cancel()


def in_put(client, of_second):
    """Stores two objects; the second's bytes end the request instead of coming."""
    first, second = objects(Prefix(bytes(32), range(1, 701)))[:2]
    broken = ObjectBytes(second.announce, of_second)
    with pytest.raises((Aborted, TailReplayError)):
        client.put(bytes(32), PREFIX.tokens, [first, broken], timeout_s=WAIT_S)


def never():
    raise Aborted


ABORTS = {
    "looked up": lambda client: client.match(PREFIX.namespace, PREFIX.tokens),
    "asked": lambda client: after_steps(client, 0),
    "first rows": lambda client: after_steps(client, 1),
    "between kinds": lambda client: after_steps(client, 30),
    "all rows": lambda client: after_steps(client, 10_000),
    "announced": lambda client: in_put(client, never),
    "half an object": lambda client: in_put(client, lambda: [bytes(100)]),
}


@pytest.fixture(scope="module", params=[64, 0], ids=["lane", "grpc"])
def server(request):
    with serve_in_thread(max_lanes=request.param, put_stall_limit_s=2.0) as server:
        yield server


@pytest.mark.parametrize("abort", ABORTS)
def test_nothing_is_held_after_an_abort(server, abort):
    with StoreClient(server.address, match_timeout_s=WAIT_S) as client:
        put(client, PREFIX)
        threads = threading.active_count()
        used = client.stats().pool_used_bytes
        ABORTS[abort](client)
        until(lambda: not client.stats().pinned_bytes)
        until(lambda: not client.stats().leases)
        until(lambda: not len(server.store._puts))
        assert client.stats().pool_used_bytes - used <= 1 << 20
        assert fetch(client, PREFIX, *RANGES)[0] == [rows_of(PREFIX, r) for r in RANGES]
        again = put(client, Prefix(bytes(32), range(1, 701)))
        assert again.stored + again.duplicates == len(PREFIX.spans())
        server.store.catalog.room.make(server.store.tiers.pool_bytes)
        assert client.stats().pool_used_bytes == 0
    until(lambda: threading.active_count() <= threads + 2)
