"""LMCache#1938, #1109, #1438: slower than no cache where prompts share little.

What it costs is measured by `benchmarks/store.py --only zero_reuse_overhead`.
"""

import pytest
from case_helpers import STORE, ask, assert_reused, assert_right, fork, prompt, replica

from tailreplay.store import serve_in_thread

pytestmark = pytest.mark.model


def test_second_sighting_takes_nothing_of_prompts_that_share_nothing():
    with serve_in_thread(admit="second", **STORE) as server, replica(server.address) as engine:
        for seed in range(3):
            ask(engine, prompt(700, seed))
        stats = server.store.stats()
        assert (stats.stored_bytes, stats.pool_used_bytes, stats.blocks) == (0, 0, 0)
        assert stats.not_admitted_objects >= 3 * 3


def test_second_sighting_takes_what_comes_again_and_the_third_prompt_hits():
    shared = prompt(700)
    with serve_in_thread(admit="second", **STORE) as server, replica(server.address) as engine:
        for seed in (1, 2):
            assert ask(engine, fork(shared, 600, seed=seed)).report["matched_tokens"] == 0
        third = fork(shared, 600, seed=3)
        out = ask(engine, third)
        assert out.report["used_tokens"] == 512  # the block in which they part came but once
        assert_right(out, third)
        again = fork(shared, 600, seed=4)
        assert_right(ask(engine, again), again)


def test_first_sighting_is_the_default():
    with serve_in_thread(**STORE) as server, replica(server.address) as engine:
        ask(engine, prompt(700))
        assert server.store.stats().not_admitted_objects == 0
        assert_reused(ask(engine, fork(prompt(700), 613)).report, 613)
