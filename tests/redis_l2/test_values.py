"""The Redis adapter keeps what it is given, and takes nothing else for it."""

import pytest
from redis_driver import key_of

from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.resp import RespConnection

pytestmark = pytest.mark.redis


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
