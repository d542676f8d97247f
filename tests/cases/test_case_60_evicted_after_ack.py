"""sglang#39444: a long prompt was evicted before its backup was written, and prefilled again."""

from contextlib import closing

import pytest
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

LONG = Prefix(bytes([60]) * 32, [i % 50_000 for i in range(16_000)])
OTHERS = [Prefix(bytes([61, i]) * 16, list(range(i, i + 2000))) for i in range(12)]
MIB = 1 << 20


def test_what_was_acknowledged_is_there_whatever_is_evicted_next(redis_server):
    settings = {"redis_url": redis_server.url, "pool_bytes": 8 * MIB}
    with serve_in_thread(**settings) as server, closing(Client(server.address)) as client:
        evict = server.store.catalog.room.make
        redis_server.pause()  # nothing of it is in Redis when it is acknowledged
        answer = client.put(LONG)
        assert answer.dropped == 0
        evict(8 * MIB)
        assert client.match(LONG).matched_tokens == 16_000
        redis_server.resume()
        for other in OTHERS:  # three times the pool, each in the way of those before
            client.put(other)
            evict(8 * MIB)
        until(lambda: not client.stats().redis_pending_bytes)
        evict(8 * MIB)
        assert client.match(LONG).matched_tokens == 16_000
        wanted = [span_range(Kind.HIDDEN, 15_000, 16_000), span_range(Kind.KV, 0, 16_000)]
        fetched = client.fetch(LONG, *wanted)
        assert not fetched.missing
        assert fetched.rows[1] == LONG.rows(Kind.KV, 0, 16_000)
