"""LMCache#2017: Redis values of 32 MB were slow, and the client's buffers grew with them."""

import hashlib
import threading
from pathlib import Path

import pytest
from lmcache.v1.distributed.api import ObjectKey

from tailreplay.store.redis_l2 import TailReplayRedisL2

pytestmark = pytest.mark.redis

MIB = 1 << 20
VALUE = 32 * MIB
ROUNDS = 6


class Memory:
    """Stands for LMCache's memory objects, of which the adapter needs two things."""

    def __init__(self, size: int) -> None:
        self.byte_array = memoryview(bytearray(size))

    def get_size(self) -> int:
        return len(self.byte_array)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The most memory that this process had while it was watched."""

    def __enter__(self) -> "Peak":
        self.bytes = rss_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, rss_bytes())


def test_a_large_value_goes_where_it_belongs_without_a_buffer_of_its_size(redis_server):
    adapter = TailReplayRedisL2({"url": redis_server.url, "patience_s": 20, "read_timeout_s": 20})
    finished = threading.Event()
    keys = [ObjectKey(hashlib.sha256(bytes([i])).digest(), "case|73", 0, 1) for i in range(ROUNDS)]
    source, target = Memory(VALUE), Memory(VALUE)
    source.byte_array[:] = bytes(range(256)) * (VALUE // 256)
    target.byte_array[:] = bytes(VALUE)
    before = rss_bytes()
    pause = threading.Event()
    try:
        with Peak() as peak:
            for key in keys:
                adapter.submit_store_task([key], [source])
                while not adapter.pop_completed_store_tasks():
                    pause.wait(0.005)
                target.byte_array[:64] = bytes(64)
                task = adapter.submit_load_task([key], [target])
                while (came := adapter.query_load_result(task)) is None:
                    pause.wait(0.005)
                assert came.test(0)
                assert target.byte_array[:64] == source.byte_array[:64]
        assert target.byte_array == source.byte_array
        assert peak.bytes - before < VALUE // 4
        assert adapter.report_status()["loaded_bytes"] == ROUNDS * VALUE
    finally:
        adapter.close()
        finished.set()
