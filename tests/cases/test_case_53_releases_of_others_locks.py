"""LMCache PR 4523: a release of a lock that was not held took another reader's."""

import threading

from lane_objects import WAIT_S
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGE = span_range(Kind.KV, 0, 700)


def test_each_reader_ends_its_own_lease_and_no_other():
    reached, gate = threading.Semaphore(0), threading.Event()

    def hold(_kind):
        reached.release()
        gate.wait(WAIT_S)

    with serve_in_thread(before_rows=hold, stall_limit_s=60) as server:
        client = Client(server.address)
        client.put(PREFIX)
        streams = [client.open_fetch(PREFIX, RANGE) for _ in range(2)]
        first, second = (next(stream).lease.lease_id for stream in streams)
        for _ in streams:
            assert reached.acquire(timeout=WAIT_S)
        pinned = client.stats().pinned_bytes
        assert pinned > 0
        for lease_id in (bytes(16), first, first, b"", first):
            client.release(lease_id)
        assert len(server.store.leases) == 1
        gate.set()
        list(streams[0])
        rows = b"".join(f.rows.data for f in streams[1] if f.WhichOneof("frame") == "rows")
        assert len(rows) == len(PREFIX.rows(Kind.KV, 0, 700))
        client.release(second)
        until(lambda: not client.stats().pinned_bytes)
        client.close()
