"""The Redis adapter on its own, against a real Redis that is killed, frozen and tampered with."""

import hashlib
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from lmcache.v1.distributed.api import ObjectKey
from waiting import until

from tailreplay.store.l2_listener import WriteBackListener
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_l2 import TailReplayRedisL2
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.resp import RespConnection
from tailreplay.store.urgent_gate import UrgentGate

LIMIT_S = 20
FAST = {"connect_timeout_s": 0.2, "patience_s": 0.2, "read_timeout_s": 0.3}

pytestmark = pytest.mark.redis


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


@pytest.fixture
def open_driver():
    drivers = []

    def open_one(*urls: str, **options) -> Driver:
        drivers.append(Driver(*urls, **{"read_timeout_s": 10, "patience_s": 10} | options))
        return drivers[-1]

    yield open_one
    for driver in drivers:
        driver.adapter.close()


@pytest.fixture
def driver(open_driver, redis_server) -> Driver:
    return open_driver(redis_server.url)


@pytest.fixture
def redis(redis_server):
    connection = RespConnection(
        RedisEndpoint.parse(redis_server.url), connect_timeout_s=5, read_timeout_s=10
    )
    yield connection
    connection.close()


def only_key(redis: RespConnection) -> bytes:
    (key,) = redis.call(b"KEYS", b"*")
    return key


def test_mixed_sizes_and_kinds_in_one_task_come_back(driver):
    sizes = [1, 4096, 50_001, 300_000, 2 << 20]
    objects = [(key_of(i, kind), size) for kind in Kind for i, size in enumerate(sizes)]
    assert driver.store(*objects)
    assert driver.listener.stored == objects
    assert driver.lookup([key for key, _ in objects] + [key_of(99)]) == [True] * 15 + [False]
    assert driver.load(*objects) == [True] * 15
    assert driver.status("loaded_bytes") == driver.status("stored_bytes") == 3 * sum(sizes)


def test_values_expire_and_keys_have_the_prefix(open_driver, redis_server, redis):
    driver = open_driver(redis_server.url, ttl_s=100, key_prefix="mine:")
    driver.store((key_of(1), 10))
    assert only_key(redis).startswith(b"mine:model|kind@")
    assert 90_000 < redis.call(b"PTTL", only_key(redis)) <= 100_000


def test_absent_keys_are_a_miss_and_others_of_the_task_come(driver):
    driver.store((key_of(1), 1000))
    assert driver.load((key_of(0), 1000), (key_of(1), 1000)) == [False, True]
    assert driver.status("absent") == 1


def flip_a_bit(redis, key):
    value = redis.call(b"GETRANGE", key, b"500", b"500")
    redis.call(b"SETRANGE", key, b"500", bytes([value[0] ^ 1]))


def truncate(redis, key):
    redis.call(b"SET", key, redis.call(b"GET", key)[:-1])


def lengthen(redis, key):
    redis.call(b"APPEND", key, b"x")


def empty(redis, key):
    redis.call(b"SET", key, b"")


def damage_the_envelope(redis, key):
    redis.call(b"SETRANGE", key, b"6", b"\xff")


def make_it_a_list(redis, key):
    redis.call(b"DEL", key)
    redis.call(b"LPUSH", key, b"x")


@pytest.mark.parametrize(
    "tamper", [flip_a_bit, truncate, lengthen, empty, damage_the_envelope, make_it_a_list]
)
def test_a_wrong_value_is_a_counted_miss_and_goes(driver, redis, tamper):
    driver.store((key_of(1), 1000))
    tamper(redis, only_key(redis))
    assert driver.load((key_of(1), 1000)) == [False]
    assert driver.status("integrity_errors") == 1
    assert redis.call(b"KEYS", b"*") == []
    assert driver.store((key_of(1), 1000))
    assert driver.load((key_of(1), 1000)) == [True]


def test_two_values_exchanged_are_both_misses(driver, redis):
    driver.store((key_of(1), 1000), (key_of(2), 1000))
    first, second = redis.call(b"KEYS", b"*")
    for words in ((first, b"spare"), (second, first), (b"spare", second)):
        redis.call(b"RENAME", *words)
    assert driver.load((key_of(1), 1000), (key_of(2), 1000)) == [False, False]
    assert driver.status("integrity_errors") == 2


def test_deleted_keys_are_gone(driver):
    driver.store((key_of(1), 10), (key_of(2), 10))
    driver.adapter.delete([key_of(1), key_of(3)])
    assert driver.lookup([key_of(1), key_of(2)]) == [False, True]
    driver.adapter.delete([])


def test_a_full_redis_refuses_stores_and_still_serves(driver, redis):
    driver.store((key_of(0), 1000))
    redis.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    assert not driver.store((key_of(1), 1 << 20), (key_of(2), 1 << 20))
    assert driver.status("refused") == 2
    assert driver.listener.failed == [key_of(1), key_of(2)]
    assert driver.load((key_of(0), 1000)) == [True]
    assert driver.status("is_healthy")


def test_listeners_hear_why_an_object_did_not_come(driver, redis, redis_server):
    driver.store((key_of(1), 1000))
    flip_a_bit(redis, only_key(redis))
    driver.lookup([key_of(0)])
    driver.load((key_of(0), 1000))
    driver.load((key_of(1), 1000))
    redis_server.kill()
    driver.load((key_of(1), 1000))
    driver.lookup([key_of(1)])
    assert driver.listener.missed == [
        (key_of(0), Miss.ABSENT),
        (key_of(1), Miss.DAMAGED),
        (key_of(1), Miss.AWAY),
        (key_of(1), Miss.AWAY),
    ]


def test_a_server_that_refuses_to_say_is_no_server_without(driver, redis):
    """As one that is still loading its data: what it has is late, not absent."""
    driver.store((key_of(1), 1000))
    redis.call(b"ACL", b"SETUSER", b"default", b"-exists", b"-pexpire")
    assert driver.lookup([key_of(1)]) == [False]
    assert driver.listener.missed == [(key_of(1), Miss.AWAY)]
    assert driver.adapter.renew([key_of(1)]) == [None]
    redis.call(b"ACL", b"SETUSER", b"default", b"+@all")
    assert driver.lookup([key_of(1)]) == [True]
    assert driver.adapter.renew([key_of(1), key_of(2)]) == [True, False]


def test_a_killed_redis_fails_at_once_and_its_return_is_noticed(open_driver, start_redis):
    server = start_redis(persistent=True)
    driver = open_driver(server.url)
    driver.store((key_of(1), 1000))
    server.kill()
    assert driver.load((key_of(1), 1000)) == [False]
    assert not driver.status("is_healthy")
    assert driver.lookup([key_of(1)]) == [False]
    assert not driver.store((key_of(2), 1000))
    assert driver.listener.failed == [key_of(2)]
    driver.adapter.delete([key_of(1)])
    server.start()
    driver.until_healthy()
    assert driver.lookup([key_of(1)]) == [True]
    assert driver.load((key_of(1), 1000)) == [True]
    assert driver.status("shards")[0]["outages"] == 1


def test_closed_connections_are_replaced_without_an_outage(driver, redis):
    driver.store((key_of(1), 1000))
    driver.load((key_of(1), 1000))
    redis.call(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")
    assert driver.lookup([key_of(1)]) == [True]
    assert driver.load((key_of(1), 1000)) == [True]
    assert driver.store((key_of(2), 1000))
    assert driver.status("shards")[0]["outages"] == 0


def test_a_redis_that_is_not_there_at_the_start_is_found_later(open_driver, start_redis):
    server = start_redis()
    server.kill()
    driver = open_driver(server.url)
    assert not driver.status("is_healthy")
    assert not driver.store((key_of(1), 10))
    server.start()
    driver.until_healthy()
    assert driver.store((key_of(1), 10))


def test_a_wrong_password_is_unhealthy_and_named_without_the_password(start_redis, open_driver):
    url = start_redis(requirepass="secret").url
    driver = open_driver(url.replace("//", "//:mistaken@"))
    status = driver.adapter.report_status()
    assert not status["is_healthy"]
    assert "WRONGPASS" in status["shards"][0]["last_error"]
    assert "mistaken" not in repr(status)
    assert open_driver(url.replace("//", "//:secret@")).store((key_of(1), 10))


def test_a_frozen_redis_hangs_no_task_and_comes_back(open_driver, redis_server):
    driver = open_driver(redis_server.url, **FAST)
    objects = [(key_of(i), 1000) for i in range(100)]
    driver.store(*objects)
    redis_server.pause()
    try:
        began = time.monotonic()
        assert driver.load(*objects) == [False] * 100
        assert time.monotonic() - began < 5  # one timeout for all, not one for each
        assert not driver.status("is_healthy")
        assert driver.lookup([key_of(1)]) == [False]
        assert not driver.store((key_of(1), 1000))
    finally:
        redis_server.resume()
    driver.until_healthy()
    assert driver.load(*objects) == [True] * 100


def test_a_silent_redis_costs_readers_its_patience_once_and_writers_nothing(
    open_driver, redis_server
):
    driver = open_driver(redis_server.url, patience_s=0.2, read_timeout_s=60)
    objects = [(key_of(i), 1000) for i in range(100)]
    driver.store(*objects)
    redis_server.pause()
    adapter = driver.adapter
    writing = adapter.submit_store_task([key_of(200)], [Memory(payload_of(key_of(200), 10))])
    assert driver.lookup([key_of(1)]) == [False]
    assert not driver.status("is_healthy")
    began = time.monotonic()
    for _ in range(100):
        assert driver.load(*objects) == [False] * 100
        assert driver.lookup([key_of(1)]) == [False]
    assert time.monotonic() - began < 10  # a hundred times the patience would be 20
    assert {why for _, why in driver.listener.missed} == {Miss.AWAY}
    redis_server.resume()
    driver.until_healthy()
    assert driver.load(*objects) == [True] * 100
    done = wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert done[writing].is_successful()
    (shard,) = driver.status("shards")
    assert (shard["silences"], shard["outages"]) == (1, 0)


def test_urgent_loads_pass_bulk_loads_which_pass_stores(open_driver, redis_server, redis):
    """With Redis frozen all tasks queue up; the order in which it then sees them is the proof."""
    driver = open_driver(redis_server.url, workers=1)
    kinds = {Kind.KV: "load", Kind.HIDDEN: "urgent", Kind.CHECKPOINT: "urgent"}
    driver.store(*((key_of(i, kind), 10) for i in range(3) for kind in Kind))
    redis.call(b"CONFIG", b"SET", b"slowlog-log-slower-than", b"0")
    redis_server.pause()
    adapter = driver.adapter
    adapter.submit_store_task([key_of(9)], [Memory(b"x" * 10)])
    driver.until(lambda status: not status["shards"][0]["queued"])  # the one worker has it
    adapter.submit_store_task([key_of(8)], [Memory(b"x" * 10)])
    for i in range(3):
        for kind in Kind:
            adapter.submit_load_task([key_of(i, kind)], [Memory(b"x" * 10)])
    redis_server.resume()
    while adapter.report_status()["stored"] < 11:
        wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    log = redis.call(b"SLOWLOG", b"GET", b"-1")
    seen = [entry[3] for entry in reversed(log) if entry[3][0] in (b"GET", b"SET")]
    order = [
        "store" if words[0] == b"SET" else kinds[Kind(int(words[1].split(b"@")[2]))]
        for words in seen
    ]
    assert order == ["store", *["urgent"] * 6, *["load"] * 3, "store"]


def test_bulk_gives_way_between_steps_to_what_is_urgent(redis_server):
    gate = UrgentGate(hold_s=3600)
    driver = Driver(redis_server.url, gate=gate)
    bulk, urgent = key_of(1), key_of(2, Kind.HIDDEN)
    driver.store((bulk, 8 << 20), (urgent, 8 << 20))
    with gate.urgent():
        waiting = driver.adapter.submit_load_task([bulk], [Memory(bytes(8 << 20))])
        storing = driver.adapter.submit_store_task([key_of(3)], [Memory(b"x")])
        assert driver.load((urgent, 8 << 20)) == [True]
        assert driver.lookup([bulk]) == [True]
        assert driver.adapter.query_load_result(waiting) is None
        assert driver.adapter.pop_completed_store_tasks() == {}
    adapter = driver.adapter
    assert wait_for(
        adapter.get_load_event_fd(), lambda: adapter.query_load_result(waiting)
    ).popcount()
    assert storing in wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    adapter.close()


def test_loads_that_nobody_waits_for_are_taken_back(open_driver, redis_server):
    driver = open_driver(redis_server.url, workers=1)
    driver.store((key_of(1), 10), (key_of(2), 10))
    redis_server.pause()
    adapter = driver.adapter
    adapter.submit_store_task([key_of(9)], [Memory(b"x" * 10)])
    driver.until(lambda status: not status["shards"][0]["queued"])  # the one worker has it
    first = adapter.submit_load_task([key_of(1), key_of(2)], [Memory(bytes(10))] * 2)
    other = adapter.submit_load_task([key_of(2)], [Memory(bytes(10))])
    adapter.cancel([key_of(1)])
    assert driver.listener.missed == [(key_of(1), Miss.LATE)]
    redis_server.resume()
    for task, came in ((first, [2]), (other, [2])):
        bitmap = wait_for(
            adapter.get_load_event_fd(), lambda task=task: adapter.query_load_result(task)
        )
        keys = [key_of(1), key_of(2)] if task == first else [key_of(2)]
        assert bitmap.gather(keys) == [key_of(i) for i in came]
    assert (driver.status("loads"), driver.status("cancelled")) == (3, 1)


def test_lookups_pass_everything(open_driver, redis_server):
    driver = open_driver(redis_server.url, workers=1)
    keys = [key_of(i) for i in range(400)]
    adapter = driver.adapter
    adapter.submit_store_task(keys, [Memory(bytes(1 << 20)) for _ in keys])
    driver.lookup(keys)
    assert adapter.pop_completed_store_tasks() == {}


def test_closing_ends_tasks_under_way(redis_server):
    driver = Driver(redis_server.url)
    redis_server.pause()
    driver.adapter.submit_store_task([key_of(1), key_of(2)], [Memory(b"x")] * 2)
    driver.adapter.close()
    assert driver.listener.failed == [key_of(1), key_of(2)]


def test_keys_spread_over_servers_and_one_that_dies_takes_only_its_own(start_redis, open_driver):
    first, second = start_redis(), start_redis()
    driver = open_driver(first.url, second.url)
    objects = [(key_of(i), 100) for i in range(64)]
    keys = [key for key, _ in objects]
    assert driver.store(*objects)
    assert driver.lookup(keys) == [True] * 64
    shares = [shard["stored"] for shard in driver.status("shards")]
    assert sum(shares) == 64
    assert min(shares) > 10
    second.kill()
    assert sum(driver.load(*objects)) == shares[0]
    assert not driver.status("is_healthy")
    assert sum(driver.lookup(keys)) == shares[0]
    assert not driver.store(*objects)
    assert len(driver.listener.failed) == shares[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no Redis server"),
        ({"url": "http://h"}, "wanted redis://"),
        ({"url": "redis://h", "wrokers": 1}, "wrokers"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TailReplayRedisL2Config.from_dict(fields)


def test_lmcaches_own_fields_are_left_to_it():
    config = TailReplayRedisL2Config.from_dict(
        {"type": "tailreplay_redis", "url": "redis://:secret@h", "eviction": {}, "workers": 5}
    )
    assert config.shard.workers == 5
    assert "secret" not in repr(config)
    assert "workers" in TailReplayRedisL2Config.help()
