"""LMCache#2170: requests of which a part failed kept memory, until there was none left.

The report's length by hand:

    PYTHONPATH=tests python -P tests/cases/test_case_59_failing_gets.py 10000
"""

import hashlib
import random
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer
from tier_objects import put_bytes
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName

pytestmark = pytest.mark.redis

SIZE = 100_000
NAMES = [
    ObjectName(bytes(32), kind, hashlib.sha256(b"case 59 %d" % i).digest())
    for i in range(16)
    for kind in (Kind.KV, Kind.HIDDEN)
]
GROWTH_BYTES = 8 << 20
"""Less than 84 of the objects that fail; the allocator's own noise is below that."""


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fail_half(raw: redis.Redis, choice: random.Random) -> None:
    """Half of what is in Redis is gone, cut or wrong; now and then all connections end."""
    for key in raw.keys("tailreplay:o:*"):
        how = choice.randrange(6)
        if how == 0:
            raw.delete(key)
        elif how == 1:
            raw.set(key, bytes(choice.randrange(SIZE)))
        elif how == 2:
            raw.setrange(key, SIZE // 2, b"\xff\x00")
    if not choice.randrange(10):
        raw.client_kill_filter(_type="normal", skipme=True)


def run(server: RedisServer, requests: int) -> tuple[int, int]:
    """Makes requests; returns how many objects failed, and by how much memory grew."""
    choice, failed, after_warmup = random.Random(59), 0, 0
    settings = {"redis_url": server.url, "pool_bytes": 8 << 20}
    with redis.Redis(port=server.port) as raw, serve_in_thread(**settings) as served:
        tiers = served.store.tiers
        for number in range(requests):
            for name in NAMES:
                put_bytes(tiers, name, bytes(SIZE))
            until(lambda: not tiers.redis_status()["pending_objects"])
            tiers.evict(NAMES)
            fail_half(raw, choice)
            pins = tiers.pin([(n, SIZE) for n in NAMES], urgent=number % 2 == 0, timeout_s=20)
            failed += sum(isinstance(pin, Miss) for pin in pins)
            tiers.unpin(pins)
            if number == requests // 4:
                after_warmup = rss_bytes()
        growth = rss_bytes() - after_warmup
        until(lambda: tiers.evict(NAMES) or not tiers.used_bytes)
        assert (tiers.used_bytes, tiers.pinned_bytes) == (0, 0)
        status = tiers.redis_status()
        ends = ("loaded", "absent", "integrity_errors", "load_failures", "cancelled")
        assert status["loads"] == sum(status[end] for end in ends)
    return failed, growth


def test_memory_is_flat_while_half_of_all_gets_fail(redis_server):
    failed, growth = run(redis_server, 40)
    assert failed > 40 * len(NAMES) // 4
    assert growth < GROWTH_BYTES


if __name__ == "__main__":
    with closing(RedisServer()) as own_server:
        sys.stdout.write(
            "failed objects, growth: {}, {}\n".format(*run(own_server, int(sys.argv[1])))
        )
