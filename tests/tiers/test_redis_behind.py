"""The CPU tier and its write-back to a real Redis."""

import threading
from contextlib import closing

import pytest
from redis_server import RedisServer
from tier_objects import MIB, Outcomes, name_of, pin, put
from waiting import until

from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.reserved import NoRoom
from tailreplay.store.resp import RespConnection
from tailreplay.store.tiers import Tiers


def write_back(tiers: Tiers, outcomes: Outcomes, *wanted: tuple[ObjectName, int]) -> None:
    """Put objects into Redis, and into Redis alone."""
    for name, size in wanted:
        assert put(tiers, name, size) is None
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
    assert put(tiers, name_of(1), 5000) is None
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
    until(lambda: put(tiers, name_of(1), 5000) is None)


@pytest.mark.redis
def test_an_object_deleted_on_its_way_to_redis_does_not_stay_there(
    open_tiers, redis_server, outcomes
):
    tiers = open_tiers(redis_url=redis_server.url)
    redis_server.pause()

    def is_being_stored() -> bool:
        if put(tiers, name_of(1), 5000) is NoRoom.EXISTS:
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


@pytest.mark.redis
def test_what_is_deleted_while_it_is_loaded_does_not_stay(open_tiers, redis_server, outcomes):
    """Nobody waits for it any more when it lands, and nobody would know that it is there."""
    tiers = open_tiers(redis_url=redis_server.url)
    name, size = name_of(1), MIB
    write_back(tiers, outcomes, (name, size))
    redis_server.pause()
    try:
        assert tiers.pin([(name, size)], urgent=True, timeout_s=0.1) == [Miss.LATE]
        tiers.delete([name], in_redis=False)
        assert tiers.held([name]) == [name]
        assert put(tiers, name, size) is NoRoom.EXISTS
    finally:
        redis_server.resume()
    until(lambda: tiers.redis_status()["loaded"] == 1)
    until(lambda: not tiers.used_bytes)
    assert not tiers.held([name])
    assert put(tiers, name, size) is None
