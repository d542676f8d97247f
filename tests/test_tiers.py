"""The CPU tier and its write-back to a real Redis."""

import hashlib
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.tiers import Pinned, PutOutcome, Tiers

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
) -> list[Pinned | None]:
    pins = tiers.pin(wanted, urgent=True, timeout_s=timeout_s)
    for (name, size), pinned in zip(wanted, pins, strict=True):
        assert pinned is None or pinned.data == payload_of(name, size)
    return pins


OpenTiers = Callable[..., Tiers]


@pytest.fixture
def open_tiers() -> Iterator[OpenTiers]:
    opened = []
    numbers = count()

    def open_one(pool_bytes: int = 16 * MIB, identity: str = "", **changed: object) -> Tiers:
        identity = identity or f"test-{os.getpid()}-{next(numbers)}"
        settings = {
            "redis_url": None,
            "on_redis_stored": lambda _: None,
            "on_redis_failed": lambda _: None,
        }
        opened.append(Tiers(pool_bytes=pool_bytes, identity=identity, **settings | changed))
        return opened[-1]

    yield open_one
    for tiers in opened:
        tiers.close()


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
    assert there is not None
    assert (absent, other_size, other_kind) == (None, None, None)
    tiers.unpin(there)
    assert tiers.evict([name_of(1)])  # the wrong size left no lock behind


def test_a_second_put_of_a_name_exists_and_keeps_the_first_bytes(tiers):
    put(tiers, name_of(1), 1000)
    assert tiers.put(name_of(1), 1000, lambda memory: None) is PutOutcome.EXISTS
    assert pin(tiers, (name_of(1), 1000))[0] is not None


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
    assert seen == [[False], [None], PutOutcome.EXISTS]


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
    tiers.unpin([first, None, first])
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
    assert pin(first, (name_of(1), 5000))[0] is not None
