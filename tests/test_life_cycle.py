"""What happens to stores: each time nothing stays pinned or leaked, and hits are back in 5 s."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
import redis
from lane_objects import WAIT_S, put
from life import BACK_S, POOL_BYTES, PREFIX, LivingStore
from redis_server import RedisServer
from store_objects import Prefix
from waiting import until

from tailreplay.store.errors import StoreUnavailable

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("life")


@pytest.fixture(scope="module")
def store(folder, own_redis):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILREPLAY_STALL_LIMIT_S", "1")
        patch.setenv("TAILREPLAY_PUT_STALL_LIMIT_S", "1")
        patch.setenv("TAILREPLAY_REDIS_TIMEOUT_S", "60")
        store = LivingStore(folder, own_redis.url)
        yield store
        store.close()


@pytest.fixture(scope="module")
def own_redis():
    server = RedisServer(unix=True, persistent=True)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def stored(store):
    """What is to be hit afterwards."""
    put(store.client, PREFIX)


def answers_promptly(store, prefix):
    """Lookups, hits and puts go on whatever Redis does; waiting for it would take a minute."""
    for call in (store.hits, lambda: put(store.client, prefix).stored, store.client.stats):
        since_s = time.monotonic()
        assert call()
        assert time.monotonic() - since_s < 10


def fresh():
    """A prefix that nobody has stored."""
    return Prefix(os.urandom(32), PREFIX.ids)


@contextmanager
def redis_that_is_stopped(server):
    server.pause()
    yield
    server.resume()


@contextmanager
def redis_that_is_killed(server):
    server.kill()
    yield
    server.start()


@contextmanager
def redis_that_is_flushed(server):
    with redis.Redis(unix_socket_path=str(server.socket_path)) as raw:
        raw.flushall()
    yield


@contextmanager
def redis_that_is_full(server):
    with redis.Redis(unix_socket_path=str(server.socket_path)) as raw:
        raw.config_set("maxmemory", "1mb")
        yield
        raw.config_set("maxmemory", "0")


@contextmanager
def redis_that_is_slow(server):
    with redis.Redis(unix_socket_path=str(server.socket_path)) as raw:
        raw.client_pause(700)
    yield


@pytest.mark.parametrize(
    "fault",
    [
        redis_that_is_stopped,
        redis_that_is_killed,
        redis_that_is_flushed,
        redis_that_is_full,
        redis_that_is_slow,
    ],
)
def test_redis_may_be_anything_while_memory_hits_and_takes(store, own_redis, fault):
    with fault(own_redis):
        answers_promptly(store, fresh())
    store.assert_well()
    until(lambda: store.client.stats().redis_healthy, BACK_S)
    prefix = fresh()
    put(store.client, prefix)
    until(lambda: not store.client.stats().redis_pending_bytes)
    with redis.Redis(unix_socket_path=str(own_redis.socket_path)) as raw:
        assert raw.dbsize() >= len(prefix.spans())


@pytest.mark.parametrize("fault", [redis_that_is_stopped, redis_that_is_slow])
def test_hits_that_lie_in_redis_alone_are_back_when_it_is(store, own_redis, fault):
    prefix = fresh()
    put(store.client, prefix)
    until(lambda: not store.client.stats().redis_pending_bytes)
    store.process.kill()
    store.start()
    assert store.client.connect(WAIT_S)
    assert store.client.stats().pool_used_bytes == 0
    with fault(own_redis):
        since_s = time.monotonic()
        assert not store.hits(prefix) or fault is redis_that_is_slow
        assert time.monotonic() - since_s < 10
    store.assert_well(prefix)


def test_a_reader_that_is_killed(store):
    reader = store.halted("fetch")
    assert store.client.stats().pinned_bytes > 0
    reader.kill()
    reader.communicate()
    store.assert_well()


def test_a_reader_that_halts_for_too_long(store):
    reader = store.halted("fetch")
    until(lambda: not store.client.stats().pinned_bytes)
    out, _ = reader.communicate("\n")
    assert "more" not in out  # it was told that what it has does not count
    store.assert_well()


def test_a_writer_that_is_killed_in_the_middle(store):
    prefix = fresh()
    writer = store.halted("put", prefix)
    used = store.client.stats().pool_used_bytes
    writer.kill()
    writer.communicate()
    until(lambda: store.client.stats().pool_used_bytes < used)
    answer = put(store.client, prefix)
    assert (answer.stored, answer.duplicates) == (len(prefix.spans()) - 1, 1)
    store.assert_well(prefix)


def test_a_store_that_is_killed(store):
    prefix, boot_id = fresh(), store.client.describe().boot_id
    put(store.client, prefix)
    until(lambda: not store.client.stats().redis_pending_bytes)
    store.process.kill()
    store.start()
    store.assert_well(prefix)
    assert store.client.describe().boot_id != boot_id


def test_a_store_that_is_killed_keeps_no_memory_of_an_engine_that_idles(store):
    """Nor is the next pool smaller for it: `store.client` has the old one mapped all the time."""
    assert store.hits()
    store.process.kill()
    store.start()
    assert store.client.connect(WAIT_S)
    assert store.held_bytes[-2:] == [0, POOL_BYTES]
    assert store.client.stats().pool_bytes == POOL_BYTES
    store.assert_well()


def test_a_store_that_is_told_to_stop_lets_what_flows_end_and_takes_nothing_new(store):
    prefix, late = fresh(), fresh()
    reader = store.halted("fetch")
    put(store.client, prefix)  # on its way to Redis still
    store.process.child.send_signal(signal.SIGTERM)
    until(lambda: is_refused(store, late))
    out, _ = reader.communicate("\n")
    assert "more" in out
    assert store.process.child.wait(WAIT_S) == 0
    assert (store.segments, sum(store.held_bytes)) == ([], 0)
    store.start()
    store.assert_well(prefix)


def is_refused(store, prefix):
    """Whether a put fails with what may be tried again."""
    try:
        put(store.client, prefix)
    except StoreUnavailable:
        return True
    return False
