"""A Redis that is killed, frozen, full of other things or not there costs little and comes back."""

import time

import pytest
from redis_driver import Memory, key_of, payload_of, wait_for

from tailreplay.store.misses import Miss

pytestmark = pytest.mark.redis

FAST = {"connect_timeout_s": 1, "patience_s": 1, "read_timeout_s": 1.5}


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
        # One timeout for all, not one for each, which would be 100.
        assert time.monotonic() - began < 20
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
    driver = open_driver(redis_server.url, patience_s=1, read_timeout_s=60)
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
    assert time.monotonic() - began < 20  # a hundred times the patience would be 100
    assert {why for _, why in driver.listener.missed} == {Miss.AWAY}
    redis_server.resume()
    driver.until_healthy()
    assert driver.load(*objects) == [True] * 100
    done = wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert done[writing].is_successful()
    (shard,) = driver.status("shards")
    assert (shard["silences"], shard["outages"]) == (1, 0)


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
