"""The CPU tier alone: objects by name, pins, deletion, and the pool's segment."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tier_objects import MIB, name_of, payload_of, pin, put, put_bytes

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned
from tailreplay.store.reserved import NoRoom
from tailreplay.store.shm_pool import pool_name
from tailreplay.store.tiers import Tiers


def test_what_was_put_can_be_pinned_and_read(tiers):
    wanted = [(name_of(i, kind), 1000 + i) for i, kind in enumerate(Kind)]
    assert [put(tiers, *w) for w in wanted] == [None] * 3
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
    assert put_bytes(tiers, name_of(1), bytes(1000)) is NoRoom.EXISTS
    assert isinstance(pin(tiers, (name_of(1), 1000))[0], Pinned)


def test_room_that_is_given_back_half_filled_leaves_nothing(tiers):
    (place,) = tiers.reserve([name_of(1)], 1000)
    place.data[:10] = b"0123456789"
    tiers.abandon([place])
    assert tiers.resident([name_of(1)]) == [False]
    assert tiers.used_bytes == 0
    assert put(tiers, name_of(1), 1000) is None


def test_an_object_is_invisible_until_it_is_filled(tiers):
    (place,) = tiers.reserve([name_of(1)], 1000)
    assert tiers.resident([name_of(1)]) == [False]
    assert tiers.pin([(name_of(1), 1000)], urgent=True, timeout_s=1) == [Miss.ABSENT]
    assert put(tiers, name_of(1), 1000) is NoRoom.EXISTS
    place.data[:] = payload_of(name_of(1), 1000)
    tiers.commit([place])
    assert tiers.resident([name_of(1)]) == [True]


def test_a_full_pool_says_so_and_takes_more_after_eviction(tiers):
    stored = 0
    while put(tiers, name_of(stored), MIB) is None:
        stored += 1
    assert stored == 16
    assert tiers.evict([name_of(3)]) == MIB
    assert put(tiers, name_of(99), MIB) is None


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
        assert (outcome is NoRoom.EXISTS) == (name in self.sizes)
        if outcome is None:
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


def test_a_deleted_object_serves_its_reader_and_nobody_else(tiers):
    put(tiers, name_of(1), 5000)
    (held,) = pin(tiers, (name_of(1), 5000))
    tiers.delete([name_of(1)])
    assert pin(tiers, (name_of(1), 5000)) == [Miss.ABSENT]
    assert held.data == payload_of(name_of(1), 5000)
    tiers.unpin(held)
    assert tiers.used_bytes == 0
    assert put(tiers, name_of(1), 5000) is None


def test_without_redis_the_status_says_so(tiers):
    assert tiers.redis_status() == {"configured": False, "healthy": False}
