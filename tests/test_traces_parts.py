"""What the figures of benchmarks/traces.py rest on."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from traces_parts.replica import QWEN3_NEXT, LruCatalog, Pool, served
from traces_parts.requests import TRACES, prompts

from tailreplay.store.catalog import Catalog
from tailreplay.store.objects import Kind, ObjectName

GIB = 1 << 30


@pytest.mark.parametrize(("trace", "count", "tokens"), [("magentic", 693, 1.6e6)])
def test_traces_have_the_prompts_of_their_sources(trace, count, tokens):
    found = list(prompts(trace, 50))
    assert len(found) == count
    assert sum(map(len, found)) == pytest.approx(tokens, rel=0.05)


def test_sessions_take_turns_and_share_their_system_prompt():
    first, second = list(prompts("tau", 2))[:2]
    same = min(len(first), len(second))
    shared = int(np.argmax(first[:same] != second[:same]))
    assert 3813 <= shared < same
    assert set(TRACES) == {"tau", "magentic"}


def test_a_pool_counts_what_it_holds():
    pool = Pool(100)
    one, two = (ObjectName(bytes(32), Kind.KV, bytes([i]) * 32) for i in range(2))
    assert pool.put(one, 60)
    assert not pool.put(two, 60)
    assert pool.resident([one, two]) == [True, False]
    assert (pool.evict([one, two]), pool.used_bytes) == (60, 0)
    assert pool.evicted[Kind.KV] == 60


def test_prefill_costs_are_those_of_its_parts():
    whole = QWEN3_NEXT.prefill(0, 5000)
    assert QWEN3_NEXT.prefill(0, 2000) + QWEN3_NEXT.prefill(2000, 5000) == pytest.approx(whole)


@pytest.mark.slow
def test_the_stores_order_is_no_worse_than_least_recently_used():
    figures = [
        served(prompts("magentic", 50), "exact+hiddens", kind(None), 2 * GIB)
        for kind in (Catalog, LruCatalog)
    ]
    ours, lru = figures
    assert ours["hit"] > lru["hit"] + 0.05
    assert ours["work"] < lru["work"] - 0.05
