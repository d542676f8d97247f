"""Mooncake#2039, sglang PR 31315: one dead peer, and every request waited for it anew."""

import time
from contextlib import closing

import pytest
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

PREFIXES = [Prefix(bytes([68, i]) * 16, list(range(600))) for i in range(20)]
MIB = 1 << 20
SETTLED_S = 2.0
SLOW_S = 6.0
"""A request on a busy machine; one that waits for a dead server would take 60 s."""


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_within_two_seconds_nobody_waits_for_a_dead_server(start_redis, how):
    servers = [start_redis(persistent=True) for _ in range(3)]
    settings = {
        "redis_url": " ".join(s.url for s in servers),
        "redis_patience_s": 0.2,
        "tier_timeout_s": 60.0,
    }
    with (
        serve_in_thread(pool_bytes=16 * MIB, **settings) as served,
        closing(Client(served.address)) as client,
    ):
        for prefix in PREFIXES:
            client.put(prefix)
        until(lambda: not client.stats().redis_pending_bytes)

        def requests() -> tuple[list[float], int]:
            """Seconds that each takes, and rows that came, with nothing left in memory before."""
            served.store.catalog.room.make(16 * MIB)
            took, tokens = [], 0
            for prefix in PREFIXES:
                began = time.perf_counter()
                fetched = client.fetch(
                    prefix, span_range(Kind.HIDDEN, 0, 600), span_range(Kind.KV, 0, 600)
                )
                took.append(time.perf_counter() - began)
                tokens += sum(600 for number in fetched.rows if number not in fetched.missing)
                reasons = {missing.reason for missing in fetched.missing.values()}
                assert reasons <= {pb.MISS_REASON_DEADLINE}
            return took, tokens

        assert requests()[1] == 2 * 600 * len(PREFIXES)
        died = time.perf_counter()
        getattr(servers[0], how)()
        try:
            while time.perf_counter() < died + SETTLED_S:
                requests()
            took, tokens = requests()
            assert max(took) < SLOW_S
            assert 0 < tokens < 2 * 600 * len(PREFIXES)
        finally:
            servers[0].start() if how == "kill" else servers[0].resume()
        until(lambda: client.stats().redis_healthy, limit_s=5)
        assert requests()[1] == 2 * 600 * len(PREFIXES)
