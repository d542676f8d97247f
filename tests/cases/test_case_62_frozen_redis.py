"""LMCache#1491, #2106: engines hung on a Redis that was there and did not answer."""

import time

import pytest
from case_helpers import STORE, ask, assert_reused, assert_right, fill_redis, prompt, replica
from waiting import until

from tailreplay.store import serve_in_thread

pytestmark = [pytest.mark.model, pytest.mark.redis]

PROMPTS = [prompt(300, seed) for seed in range(6)]
BUSY_S = 6
"""What a machine with other things to do may add to a request; waiting for Redis would add 20 s."""


def test_a_frozen_redis_costs_a_request_little_and_comes_back_by_itself(redis_server):
    fill_redis(redis_server.url, *PROMPTS)
    settings = STORE | {"redis_url": redis_server.url, "redis_patience_s": 0.2}
    with serve_in_thread(**settings) as server, replica(server.address) as engine:
        cold_s = max(ask(engine, prompt(300, 90 + i)).report["ttft_s"] for i in range(3))
        redis_server.pause()
        try:
            took = []
            for tokens in PROMPTS[:4]:
                began = time.perf_counter()
                out = engine.generate(tokens, 1)
                took.append(time.perf_counter() - began)
                assert_right(out, tokens)
                assert out.report["lost"].keys() <= {"deadline"}
            assert max(took) <= cold_s + 0.25 + BUSY_S
            assert not server.store.stats().redis_healthy
        finally:
            redis_server.resume()
        until(lambda: server.store.stats().redis_healthy, limit_s=5)
        assert_reused(ask(engine, PROMPTS[5]).report, 299)
