"""The CPU tier and its write-back to a real Redis."""

import hashlib
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from redis_server import RedisServer
from waiting import until

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned
from tailreplay.store.pool import Pool
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.reserved import PutOutcome
from tailreplay.store.resp import RespConnection
from tailreplay.store.shm_pool import pool_name
from tailreplay.store.tiers import Tiers

MIB = 1 << 20
NAMESPACE = bytes(range(32))


def name_of(i: int, kind: Kind = Kind.KV) -> ObjectName:
    return ObjectName(NAMESPACE, kind, hashlib.sha256(b"%d" % i).digest())


def payload_of(name: ObjectName, size: int) -> bytes:
    """Bytes that tell which object they belong to at every 33-byte step."""
    unit = bytes([name.kind]) + name.prefix_hash
    return (unit * (size // len(unit) + 1))[:size]


def put(tiers: Tiers, name: ObjectName, size: int) -> PutOutcome:
    def fill(memory: memoryview) -> None:
        memory[:] = payload_of(name, size)

    return tiers.put(name, size, fill)


def pin(
    tiers: Tiers, *wanted: tuple[ObjectName, int], timeout_s: float = 20
) -> list[Pinned | Miss]:
    pins = tiers.pin(wanted, urgent=True, timeout_s=timeout_s)
    for (name, size), pinned in zip(wanted, pins, strict=True):
        assert isinstance(pinned, Miss) or pinned.data == payload_of(name, size)
    return pins


OpenTiers = Callable[..., Tiers]
Outcomes = queue.Queue[tuple[str, ObjectName]]


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


def test_what_was_put_can_be_pinned_and_read(tiers):
    wanted = [(name_of(i, kind), 1000 + i) for i, kind in enumerate(Kind)]
    assert [put(tiers, *w) for w in wanted] == [PutOutcome.STORED] * 3
    pins = pin(tiers, *wanted)
    assert [p.source for p in pins] == ["cpu"] * 3
    assert all(p.data.readonly for p in pins)


def test_absent_objects_and_wrong_sizes_are_none_in_their_place(tiers):
    put(tiers, name_of(1), 1000)
    absent, there, other_size, other_kind = pin(
        tiers,
        (name_of(0), 1000),
        (name_of(1), 1000),
        (name_of(1), 999),
        (name_of(1, Kind.HIDDEN), 1000),
    )
    assert isinstance(there, Pinned)
    assert (absent, other_size, other_kind) == (Miss.ABSENT,) * 3
    tiers.unpin(there)
    assert tiers.evict([name_of(1)])  # the wrong size left no lock behind


def test_a_second_put_of_a_name_exists_and_keeps_the_first_bytes(tiers):
    put(tiers, name_of(1), 1000)
    assert tiers.put(name_of(1), 1000, lambda memory: None) is PutOutcome.EXISTS
    assert isinstance(pin(tiers, (name_of(1), 1000))[0], Pinned)


def test_a_fill_that_raises_leaves_nothing(tiers):
    def broken(memory: memoryview) -> None:
        memory[:10] = b"0123456789"
        raise KeyError("half way")

    with pytest.raises(KeyError):
        tiers.put(name_of(1), 1000, broken)
    assert tiers.resident([name_of(1)]) == [False]
    assert tiers.used_bytes == 0
    assert put(tiers, name_of(1), 1000) is PutOutcome.STORED


def test_an_object_is_invisible_until_it_is_filled(tiers):
    seen = []

    def fill(memory: memoryview) -> None:
        seen.append(tiers.resident([name_of(1)]))
        seen.append(tiers.pin([(name_of(1), 1000)], urgent=True, timeout_s=1))
        seen.append(put(tiers, name_of(1), 1000))

    tiers.put(name_of(1), 1000, fill)
    assert seen == [[False], [Miss.ABSENT], PutOutcome.EXISTS]


def test_a_full_pool_says_so_and_takes_more_after_eviction(tiers):
    stored = 0
    while put(tiers, name_of(stored), MIB) is PutOutcome.STORED:
        stored += 1
    assert stored == 16
    assert tiers.evict([name_of(3)]) == MIB
    assert put(tiers, name_of(99), MIB) is PutOutcome.STORED


def test_pinned_objects_are_not_evicted_and_count_once(tiers):
    put(tiers, name_of(1), 5000)
    first, second = pin(tiers, (name_of(1), 5000), (name_of(1), 5000))
    assert tiers.pinned_bytes == 8192
    tiers.unpin(first)
    assert tiers.evict([name_of(1)]) == 0
    tiers.unpin(second)
    assert tiers.pinned_bytes == 0
    assert tiers.evict([name_of(1)]) == 8192


def test_unpinning_again_does_not_take_somebody_elses_pin(tiers):
    put(tiers, name_of(1), 5000)
    first, second = pin(tiers, (name_of(1), 5000), (name_of(1), 5000))
    tiers.unpin([first, Miss.LATE, first])
    tiers.unpin(first)
    assert tiers.evict([name_of(1)]) == 0
    assert second.data == payload_of(name_of(1), 5000)


def test_the_pool_is_a_file_in_shared_memory_that_goes_on_close(open_tiers):
    tiers = open_tiers()
    put(tiers, name_of(1), 5000)
    put(tiers, name_of(2), 5000)
    (pinned,) = pin(tiers, (name_of(2), 5000))
    with Path(tiers.shm_path).open("rb") as segment:
        segment.seek(pinned.pool_offset)
        assert segment.read(5000) == payload_of(name_of(2), 5000)
    tiers.close()
    assert not Path(tiers.shm_path).exists()


def test_two_stores_of_one_identity_never_share_a_pool(open_tiers):
    first = open_tiers(identity=f"twin-{os.getpid()}")
    put(first, name_of(1), 5000)
    with pytest.raises(StoreUnavailable, match="already running"):
        open_tiers(identity=f"twin-{os.getpid()}")
    assert isinstance(pin(first, (name_of(1), 5000))[0], Pinned)


def test_a_killed_stores_segment_is_replaced(open_tiers):
    identity = f"killed-{os.getpid()}"
    stale = Path("/dev/shm") / pool_name(identity)
    stale.write_bytes(b"stale")
    stale.with_suffix(".lock").touch()
    tiers = open_tiers(identity=identity)
    assert Path(tiers.shm_path) == stale
    assert stale.stat().st_size == tiers.pool_bytes == 16 * MIB
    tiers.close()
    assert not stale.exists()
    assert not stale.with_suffix(".lock").exists()


def test_many_threads_see_only_whole_objects_and_leave_no_lock(tiers):
    wanted = [(name_of(i, kind), 1000 * (i + 1)) for i in range(8) for kind in Kind]

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(100):
            some = choice.sample(wanted, 4)
            put(tiers, *some[0])
            pins = pin(tiers, *some)
            tiers.evict([name for name, _ in some])
            assert all(
                p.data == payload_of(p.name, len(p.data)) for p in pins if isinstance(p, Pinned)
            )
            tiers.unpin(pins)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    tiers.evict([name for name, _ in wanted])
    assert (tiers.used_bytes, tiers.pinned_bytes) == (0, 0)


class CpuTier(RuleBasedStateMachine):
    """A pool of 256 pages of 4096 bytes against a dict."""

    tiers: Tiers
    names = st.integers(0, 9).map(name_of)

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[ObjectName, int] = {}
        self.pins: list[Pinned] = []

    def pages(self, name: ObjectName) -> int:
        return -(-self.sizes[name] // 4096)

    def held(self) -> set[ObjectName]:
        return {p.name for p in self.pins}

    @rule(name=names, size=st.integers(1, 300_000))
    def put(self, name, size):
        outcome = put(self.tiers, name, size)
        assert (outcome is PutOutcome.EXISTS) == (name in self.sizes)
        if outcome is PutOutcome.STORED:
            self.sizes[name] = size

    @rule(names=st.lists(names, max_size=4))
    def pin(self, names):
        pins = pin(self.tiers, *((name, self.sizes.get(name, 1)) for name in names))
        assert [isinstance(p, Pinned) for p in pins] == [name in self.sizes for name in names]
        self.pins += [p for p in pins if isinstance(p, Pinned)]

    @rule(data=st.data())
    def unpin(self, data):
        if self.pins:
            pinned = data.draw(st.sampled_from(self.pins))
            self.tiers.unpin(pinned)
            self.pins.remove(pinned)

    @rule(names=st.lists(names, max_size=4, unique=True))
    def evict(self, names):
        goes = [name for name in names if name in self.sizes and name not in self.held()]
        assert self.tiers.evict(names) == 4096 * sum(map(self.pages, goes))
        for name in goes:
            del self.sizes[name]

    @rule(name=names)
    def delete(self, name):
        if name not in self.held():
            self.tiers.delete([name])
            self.sizes.pop(name, None)

    @invariant()
    def figures_agree(self):
        everything = [name_of(i) for i in range(10)]
        assert self.tiers.resident(everything) == [name in self.sizes for name in everything]
        assert self.tiers.used_bytes == 4096 * sum(map(self.pages, self.sizes))
        assert self.tiers.pinned_bytes == 4096 * sum(map(self.pages, self.held()))
        for pinned in self.pins:
            assert pinned.data == payload_of(pinned.name, self.sizes[pinned.name])

    def teardown(self):
        self.tiers.unpin(self.pins)
        self.tiers.evict(list(self.sizes))


def test_the_cpu_tier_is_a_dict_with_locks(open_tiers):
    CpuTier.tiers = open_tiers(pool_bytes=MIB)
    machine = CpuTier.TestCase()
    machine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
    machine.runTest()


def write_back(tiers: Tiers, outcomes: Outcomes, *wanted: tuple[ObjectName, int]) -> None:
    """Put objects into Redis, and into Redis alone."""
    for name, size in wanted:
        assert put(tiers, name, size) is PutOutcome.STORED
        assert outcomes.get(timeout=20) == ("stored", name)
        until(lambda name=name: tiers.evict([name]))
    assert tiers.used_bytes == 0


@pytest.mark.redis
def test_what_left_the_cpu_tier_comes_back_from_redis_and_stays(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    wanted = [(name_of(i, kind), size) for kind in Kind for i, size in enumerate([1, 5000, MIB])]
    write_back(tiers, outcomes, *wanted)
    pins = pin(tiers, *wanted, (name_of(77), 5000))
    assert [p.source for p in pins[:9]] == ["redis"] * 9
    assert pins[9:] == [Miss.ABSENT]
    again = pin(tiers, *wanted)
    assert [p.source for p in again] == ["cpu"] * 9
    tiers.unpin(pins + again)
    assert tiers.evict([name for name, _ in wanted])
    assert (tiers.used_bytes, tiers.pinned_bytes) == (0, 0)
    assert outcomes.empty()  # what came from Redis is not written there again


@pytest.mark.redis
def test_an_object_asked_for_twice_is_pinned_twice(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    write_back(tiers, outcomes, (name_of(1), 5000))
    first, second = pin(tiers, (name_of(1), 5000), (name_of(1), 5000))
    tiers.unpin(first)
    assert tiers.evict([name_of(1)]) == 0
    tiers.unpin(second)
    assert tiers.evict([name_of(1)]) == 8192


@pytest.mark.redis
def test_another_size_than_stored_is_a_miss(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    write_back(tiers, outcomes, (name_of(1), 5000))
    assert pin(tiers, (name_of(1), 4999)) == [Miss.DAMAGED]
    assert tiers.redis_status()["integrity_errors"] == 1
    assert tiers.used_bytes == 0


@pytest.mark.redis
@pytest.mark.parametrize("urgent", [True, False])
def test_a_request_beyond_the_pool_brings_what_fits(open_tiers, redis_server, outcomes, urgent):
    tiers = open_tiers(redis_url=redis_server.url)
    wanted = [(name_of(i), MIB) for i in range(40)]
    write_back(tiers, outcomes, *wanted)
    pins = tiers.pin(wanted, urgent=urgent, timeout_s=20)
    assert all(isinstance(p, Pinned) for p in pins[:16])
    assert pins[16:] == [Miss.NO_ROOM] * 24
    tiers.unpin(pins)
    assert tiers.evict([name for name, _ in wanted]) == 16 * MIB


@pytest.mark.redis
def test_a_pool_with_holes_takes_as_many_as_have_room(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    wanted = [(name_of(i), MIB) for i in range(8)]
    write_back(tiers, outcomes, *wanted)
    sizes = [MIB] * 8 + [MIB // 2] * 16
    for i, size in enumerate(sizes):
        put(tiers, name_of(100 + i), size)
        outcomes.get(timeout=20)
    for i in range(0, len(sizes), 2):
        until(lambda i=i: tiers.evict([name_of(100 + i)]))
    assert tiers.pool_bytes - tiers.used_bytes == 8 * MIB  # half of it in pieces too small
    pins = pin(tiers, *wanted)
    assert [p.source for p in pins[:4]] == ["redis"] * 4
    assert pins[4:] == [Miss.NO_ROOM] * 4


@pytest.mark.redis
def test_a_damaged_value_in_redis_is_a_counted_miss(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    write_back(tiers, outcomes, (name_of(1), 5000))
    with closing(redis_to(redis_server)) as redis:
        (key,) = redis.call(b"KEYS", b"*")
        redis.call(b"SETRANGE", key, b"4000", b"\0\0\0\0")
        assert pin(tiers, (name_of(1), 5000)) == [Miss.DAMAGED]
        assert redis.call(b"KEYS", b"*") == []
    assert tiers.redis_status()["integrity_errors"] == 1
    assert tiers.used_bytes == 0


def redis_to(server: RedisServer) -> RespConnection:
    return RespConnection(RedisEndpoint.parse(server.url), connect_timeout_s=5, read_timeout_s=20)


@pytest.mark.redis
def test_without_redis_objects_stay_in_the_cpu_tier_and_its_return_is_noticed(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    redis_server.kill()
    assert put(tiers, name_of(1), 5000) is PutOutcome.STORED
    assert outcomes.get(timeout=20) == ("failed", name_of(1))
    assert pin(tiers, (name_of(1), 5000), (name_of(2), 5000))[1] is Miss.AWAY
    assert not tiers.redis_status()["healthy"]
    redis_server.start()
    until(lambda: tiers.redis_status()["healthy"])
    put(tiers, name_of(3), 5000)
    assert outcomes.get(timeout=20) == ("stored", name_of(3))


@pytest.mark.redis
def test_a_pin_that_waits_too_long_gives_up_and_leaves_nothing_behind(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    wanted = [(name_of(i), MIB) for i in range(12)]
    write_back(tiers, outcomes, *wanted)
    redis_server.pause()
    assert pin(tiers, *wanted, timeout_s=0.05) == [Miss.LATE] * 12
    redis_server.resume()
    put(tiers, name_of(99), 5000)  # answered after everything that was under way
    assert outcomes.get(timeout=20) == ("stored", name_of(99))
    everything = [name_of(99), *(name for name, _ in wanted)]
    until(lambda: tiers.evict(everything) == tiers.used_bytes == 0)
    assert tiers.pinned_bytes == 0


@pytest.mark.redis
def test_a_pin_that_nobody_wants_any_more_ends_before_its_time(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    wanted = [(name_of(i), MIB) for i in range(12)]
    write_back(tiers, outcomes, *wanted)
    redis_server.pause()
    asked = iter([False, True])
    pins = tiers.pin(wanted, urgent=True, timeout_s=100, is_gone=lambda: next(asked))
    redis_server.resume()
    assert pins == [Miss.LATE] * 12
    everything = [name for name, _ in wanted]
    put(tiers, name_of(99), 5000)  # answered after everything that was under way
    assert outcomes.get(timeout=20) == ("stored", name_of(99))
    until(lambda: tiers.evict([name_of(99), *everything]) == tiers.used_bytes == 0)


@pytest.mark.redis
def test_each_write_back_has_one_outcome_even_when_evicted_before(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    names = [name_of(i) for i in range(300)]
    for name in names:
        put(tiers, name, 5000)
        tiers.evict([name])
    seen = [outcomes.get(timeout=20) for _ in names]
    assert {name for _, name in seen} == set(names)
    assert tiers.redis_status()["pending_objects"] == 0
    tiers.evict(names)
    lost = [name for outcome, name in seen if outcome == "failed"]
    assert [p for p in pin(tiers, *((name, 5000) for name in lost)) if isinstance(p, Pinned)] == []
    assert outcomes.empty()


@pytest.mark.redis
def test_a_deleted_object_is_gone_from_both_tiers(open_tiers, redis_server, outcomes):
    tiers = open_tiers(redis_url=redis_server.url)
    put(tiers, name_of(1), 5000)
    assert outcomes.get(timeout=20) == ("stored", name_of(1))
    tiers.delete([name_of(1), name_of(2)])
    assert pin(tiers, (name_of(1), 5000)) == [Miss.ABSENT]
    assert tiers.resident([name_of(1)]) == [False]
    until(lambda: put(tiers, name_of(1), 5000) is PutOutcome.STORED)


def test_a_deleted_object_serves_its_reader_and_nobody_else(tiers):
    put(tiers, name_of(1), 5000)
    (held,) = pin(tiers, (name_of(1), 5000))
    tiers.delete([name_of(1)])
    assert pin(tiers, (name_of(1), 5000)) == [Miss.ABSENT]
    assert held.data == payload_of(name_of(1), 5000)
    tiers.unpin(held)
    assert tiers.used_bytes == 0
    assert put(tiers, name_of(1), 5000) is PutOutcome.STORED


@pytest.mark.redis
def test_an_object_deleted_on_its_way_to_redis_does_not_stay_there(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    redis_server.pause()

    def is_being_stored() -> bool:
        if put(tiers, name_of(1), 5000) is PutOutcome.EXISTS:
            return True  # and not evicted below, because it is locked
        if tiers.evict([name_of(1)]):
            assert outcomes.get(timeout=20) == ("failed", name_of(1))
        return False

    until(is_being_stored)
    deleting = threading.Thread(target=tiers.delete, args=([name_of(1)],))
    deleting.start()
    assert pin(tiers, (name_of(1), 5000), timeout_s=0.01) == [Miss.ABSENT]
    redis_server.resume()
    deleting.join()
    assert outcomes.get(timeout=20) == ("failed", name_of(1))
    with closing(redis_to(redis_server)) as redis:
        until(lambda: redis.call(b"KEYS", b"*") == [])


@pytest.mark.redis
def test_closing_while_redis_is_frozen_ends_and_fails_what_was_pending(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    write_back(tiers, outcomes, (name_of(1), MIB))
    redis_server.pause()
    put(tiers, name_of(2), MIB)
    pin(tiers, (name_of(1), MIB), timeout_s=0.01)
    tiers.close()
    assert outcomes.get(timeout=20) == ("failed", name_of(2))


def test_without_redis_the_status_says_so(tiers):
    assert tiers.redis_status() == {"configured": False, "healthy": False}
