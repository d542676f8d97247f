"""production-stack#923, LMCache#900: a cache server without eviction was killed every hour."""

import re
from pathlib import Path

import pytest
from lane_objects import WAIT_S, fetch, put, rows_of
from store_objects import Prefix, span_range

from tailreplay.connector.client import StoreClient
from tailreplay.connector.demo_processes import start_store
from tailreplay.store.geometry import Dtype, hidden_geometry, kv_geometry
from tailreplay.store.objects import Kind

POOL_BYTES = 64 << 20
GEOMETRY = {
    Kind.KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=128, dtype=Dtype.BFLOAT16),
    Kind.HIDDEN: hidden_geometry(sources=2, hidden_size=512, dtype=Dtype.BFLOAT16),
}
"""2 MiB per prefix of 512 tokens."""


def resident_bytes(pid):
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.redis)])
def redis_url(request):
    """Of a Redis behind the store, or of none."""
    return request.getfixturevalue("redis_server").url if request.param else None


@pytest.mark.slow
def test_memory_stays_and_the_oldest_goes(tmp_path, redis_url):
    process = start_store(f"unix://{tmp_path}/store.sock", redis_url, POOL_BYTES, tmp_path)
    try:
        with StoreClient(f"unix://{tmp_path}/store.sock", match_timeout_s=WAIT_S) as client:
            empty = resident_bytes(process.child.pid)
            prefixes = [
                Prefix(number.to_bytes(32, "big"), range(512), GEOMETRY)
                for number in range(5 * POOL_BYTES >> 21)
            ]
            spans = prefixes[0].spans(Kind.KV, Kind.HIDDEN)
            for prefix in prefixes:
                answer = put(client, prefix, spans=spans)
                assert (answer.stored, answer.dropped) == (len(spans), 0)
            assert client.stats().pool_used_bytes > POOL_BYTES // 2
            assert resident_bytes(process.child.pid) - empty <= 0.15 * POOL_BYTES
            last, wanted = prefixes[-1], span_range(Kind.KV, 0, 512)
            assert fetch(client, last, wanted)[0] == [rows_of(last, wanted)]
            first = client.match(prefixes[0].namespace, prefixes[0].tokens)
            assert first.matched_tokens == (512 if redis_url else 0)
            assert process.child.poll() is None
    finally:
        process.stop()
