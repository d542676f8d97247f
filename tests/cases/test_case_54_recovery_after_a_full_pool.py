"""LMCache#3187: 17,000 failed allocations in four hours, and no recovery once load was gone."""

import threading
import time
from contextlib import closing

import pytest
from store_objects import GEOMETRY, Client, Prefix, span_range

from tailreplay.store import serve_in_thread
from tailreplay.store.header import object_bytes
from tailreplay.store.objects import Kind

MIB = 1 << 20
KV = Kind.KV
BLOCKS = 40
BLOCK_BYTES = object_bytes(GEOMETRY[KV], 256)


def prefix_of(number: int) -> Prefix:
    return Prefix(number.to_bytes(32, "big"), range(BLOCKS * 256))


class Reader(threading.Thread):
    """Reads one prefix over and over until it is told to stop."""

    def __init__(self, address: str, prefix: Prefix, stop: threading.Event) -> None:
        super().__init__()
        self._address, self._prefix, self._stop_reading = address, prefix, stop
        self.whole = 0

    def run(self) -> None:
        wanted = span_range(KV, 0, len(self._prefix))
        with closing(Client(self._address)) as client:
            while not self._stop_reading.is_set():
                got = client.fetch(self._prefix, wanted)
                if not got.missing:
                    assert got.rows[0] == self._prefix.rows(KV, 0, len(self._prefix))
                    self.whole += 1


NO_REDIS, REDIS, FROZEN_REDIS = "no Redis", "a Redis", "a Redis that is frozen"


@pytest.fixture(
    params=[
        NO_REDIS,
        pytest.param(REDIS, marks=pytest.mark.redis),
        pytest.param(FROZEN_REDIS, marks=pytest.mark.redis),
    ]
)
def behind(request):
    """Settings with what is behind the pool, and what to do before the burst."""
    if request.param == NO_REDIS:
        return {}, lambda: None
    redis = request.getfixturevalue("redis_server")
    before = redis.pause if request.param == FROZEN_REDIS else lambda: None
    return {"redis_url": redis.url, "put_patience_s": 0.5}, before


def test_a_burst_of_twice_the_pool_under_readers_loses_no_write_and_cuts_no_reader(behind):
    redis, before = behind
    settings = {"pool_bytes": 8 * MIB, "fetch_window_bytes": MIB, "stall_limit_s": 30.0, **redis}
    with serve_in_thread(**settings) as server, closing(Client(server.address)) as client:
        hot, stop = prefix_of(0), threading.Event()
        client.put(hot, hot.spans(KV))
        readers = [Reader(server.address, hot, stop) for _ in range(2)]
        for reader in readers:
            reader.start()
        before()
        for number in range(1, 2 * server.store.tiers.pool_bytes // (BLOCKS * BLOCK_BYTES) + 2):
            prefix = prefix_of(number)
            answer = client.put(prefix, prefix.spans(KV))
            assert (answer.stored, answer.dropped) == (BLOCKS, 0)
        stop.set()
        for reader in readers:
            reader.join(30)
            assert reader.whole > 0
        # Load is gone: what was full takes everything again.
        began_s = time.monotonic()
        for later in range(1000, 1005):
            prefix = prefix_of(later)
            assert client.put(prefix, prefix.spans(KV)).stored == BLOCKS
        assert time.monotonic() - began_s < 5
        assert client.match(prefix).matched_tokens == len(prefix)
        assert server.store.tiers.pinned_bytes == 0
