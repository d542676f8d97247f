"""Tiers on a pool of their own, and what became of their write-backs."""

import os
import queue
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from tier_objects import MIB, OpenTiers, Outcomes

from tailreplay.store.pool import Pool
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.tiers import Tiers


@pytest.fixture(scope="module")
def closer() -> Iterator[ThreadPoolExecutor]:
    """Closes tiers beside the next tests, because LMCache's threads sleep 2 s before they end."""
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def outcomes() -> Outcomes:
    """What became of write-backs, in order."""
    return queue.Queue()


@pytest.fixture
def open_tiers(closer: ThreadPoolExecutor, outcomes: Outcomes) -> Iterator[OpenTiers]:
    opened = []
    numbers = count()

    def open_one(pool_bytes: int = 16 * MIB, identity: str = "", redis_url: str | None = None):
        opened.append(
            Tiers(
                Pool(
                    identity or f"test-{os.getpid()}-{random.random()}-{next(numbers)}",
                    pool_bytes,
                    "auto",
                    None,
                ),
                redis=redis_url
                and TailReplayRedisL2Config.from_dict(
                    {"url": redis_url, "read_timeout_s": 1.0, "patience_s": 10}
                ),
                on_redis_stored=lambda names: [outcomes.put(("stored", n)) for n in names],
                on_redis_failed=lambda names: [outcomes.put(("failed", n)) for n in names],
            )
        )
        return opened[-1]

    yield open_one
    closed = [closer.submit(tiers.close) for tiers in opened]
    assert not [future.exception() for future in closed if future.done() and future.exception()]


@pytest.fixture
def tiers(open_tiers: OpenTiers) -> Tiers:
    return open_tiers()
