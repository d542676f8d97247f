"""LMCache#987, #1285: with 100 GB the hit rate decayed to nothing over hours.

The small form; `python -P benchmarks/soak.py --minutes 180 --json` is the long one.
"""

import os

from soak_load import Soak

from tailreplay.store import serve_in_thread


def test_the_same_hour_hits_as_often_the_sixth_time_as_the_second():
    with serve_in_thread(pool_bytes=4 << 20) as server:
        soak = Soak(server.store, os.urandom(32), prompts=240, seed=1)
        hour = soak.requests(300)
        rates = [soak.serve(hour).share for _ in range(6)]
        assert server.store.stats().evicted_bytes > server.store.tiers.pool_bytes
    assert 0.3 < rates[1] < 0.95, "a load that always or never hits shows nothing"
    assert abs(rates[-1] - rates[1]) < 0.02
    assert max(rates[1:]) - min(rates[1:]) < 0.02
