"""The Redis adapter, used as LMCache's controllers do."""

import hashlib
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmcache.v1.distributed.api import ObjectKey
from waiting import until

from tailreplay.store.l2_listener import WriteBackListener
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind
from tailreplay.store.redis_l2 import TailReplayRedisL2
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.urgent_gate import UrgentGate

LIMIT_S = 20


class Memory:
    """Stands for LMCache's memory objects, of which the adapter needs two things."""

    def __init__(self, content: bytes) -> None:
        self.byte_array = memoryview(bytearray(content))

    def get_size(self) -> int:
        return len(self.byte_array)


def key_of(i: int, kind: Kind = Kind.KV) -> ObjectKey:
    return ObjectKey(hashlib.sha256(b"%d" % i).digest(), "model|kind", 0, int(kind))


def payload_of(key: ObjectKey, size: int) -> bytes:
    return (key.chunk_hash * (size // 32 + 1))[:size]


@dataclass
class Listener(WriteBackListener):
    stored: list[tuple[ObjectKey, int]] = field(default_factory=list)
    failed: list[ObjectKey] = field(default_factory=list)
    missed: list[tuple[ObjectKey, Miss]] = field(default_factory=list)

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_failed(self, keys):
        self.failed += keys

    def on_l2_keys_missed(self, keys, why):
        self.missed += [(key, why) for key in keys]

    def on_l2_keys_accessed(self, keys): ...

    def on_l2_keys_deleted(self, keys): ...


def wait_for(fd: int, poll, limit_s: float = LIMIT_S):
    """What `poll` returns, asked each time the descriptor says that something is finished."""
    while (result := poll()) in (None, {}):
        assert select.select([fd], [], [], limit_s)[0], "nothing finished in time"
    return result


class Driver:
    """Uses an adapter as LMCache's controllers do."""

    def __init__(self, *urls: str, gate: UrgentGate | None = None, **options) -> None:
        config = TailReplayRedisL2Config.from_dict({"urls": list(urls), **options})
        self.adapter = TailReplayRedisL2(replace(config, gate=gate or UrgentGate()))
        self.listener = Listener()
        self.adapter.register_listener(self.listener)

    def store(self, *objects: tuple[ObjectKey, int]) -> bool:
        keys = [key for key, _ in objects]
        memory = [Memory(payload_of(key, size)) for key, size in objects]
        task = self.adapter.submit_store_task(keys, memory)
        done = wait_for(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        return done[task].is_successful()

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {})
        bitmap = wait_for(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task),
        )
        return [bitmap.test(i) for i in range(len(keys))]

    def load(self, *objects: tuple[ObjectKey, int]) -> list[bool]:
        """Which objects came; those that did have the right bytes."""
        keys = [key for key, _ in objects]
        memory = [Memory(b"\xee" * size) for _, size in objects]
        task = self.adapter.submit_load_task(keys, memory)
        bitmap = wait_for(
            self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task)
        )
        came = [bitmap.test(i) for i in range(len(keys))]
        for (key, size), one, ok in zip(objects, memory, came, strict=True):
            assert not ok or one.byte_array == payload_of(key, size)
        return came

    def status(self, counter: str):
        return self.adapter.report_status()[counter]

    def until(self, true: Callable[[dict], bool]) -> None:
        """Wait for a status, which the adapter reaches by itself."""
        until(lambda: true(self.adapter.report_status()), LIMIT_S)

    def until_healthy(self) -> None:
        self.until(lambda status: status["is_healthy"])
