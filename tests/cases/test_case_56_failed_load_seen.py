"""LMCache#5032: what a failed load had written into the pool was readable until it was deleted."""

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from tier_objects import put_bytes

from tailreplay.store import serve_in_thread
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned

pytestmark = pytest.mark.redis

SIZE = 200_000
NAMES = [
    ObjectName(bytes(32), Kind.KV, hashlib.sha256(b"case 56 %d" % i).digest()) for i in range(8)
]


def payload_of(name: ObjectName) -> bytes:
    return (name.prefix_hash * (SIZE // 32 + 1))[:SIZE]


def spoil(raw: redis.Redis) -> None:
    """Makes every value wrong in its last byte: a load writes nearly all of it, and then fails."""
    for key in raw.keys("tailreplay:o:*"):
        value = raw.get(key)
        if value is not None:
            raw.set(key, value[:-1] + bytes([value[-1] ^ 1]))


def test_no_reader_sees_what_a_failed_load_left(redis_server):
    with (
        redis.Redis(port=redis_server.port) as raw,
        serve_in_thread(redis_url=redis_server.url, pool_bytes=4 << 20) as server,
        ThreadPoolExecutor(4) as readers,
    ):
        tiers = server.store.tiers

        def read(seed: int) -> tuple[int, int]:
            choice, good, failed = random.Random(seed), 0, 0
            for _ in range(60):
                wanted = [(name, SIZE) for name in choice.sample(NAMES, 4)]
                pins = tiers.pin(wanted, urgent=True, timeout_s=20)
                for (name, _), pin in zip(wanted, pins, strict=True):
                    if isinstance(pin, Pinned):
                        assert pin.data == payload_of(name)
                        good += 1
                    failed += pin is Miss.DAMAGED
                tiers.unpin(pins)
                tiers.evict([name for name, _ in wanted])
            return good, failed

        running = [readers.submit(read, seed) for seed in range(4)]
        while not all(task.done() for task in running):
            for name in NAMES:
                put_bytes(tiers, name, payload_of(name))
            spoil(raw)
        good, failed = (
            sum(figures) for figures in zip(*(t.result() for t in running), strict=True)
        )
        assert good > 20
        assert failed > 20
        assert tiers.pinned_bytes == 0
