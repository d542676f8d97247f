"""What is in Redis, listed and deleted by LMCache's own service for operators."""

import asyncio
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.api import ObjectKey, Tier
from lmcache.v1.multiprocess.cache_control.errors import InvalidRequest
from lmcache.v1.multiprocess.cache_control.object_service import ObjectService
from redis_driver import key_of

from tailreplay.store.lmcache_l1 import construct_l1, construct_manager
from tailreplay.store.redis_l2_config import TailReplayRedisL2Config
from tailreplay.store.redis_object_keys import object_key_of, pattern_of, redis_key

pytestmark = pytest.mark.redis

KEYS = [key_of(i) for i in range(40)]
OTHERS = [ObjectKey(bytes(32), "[other]*/model", 0x02010201, 1, "a salt")]


@pytest.fixture
def urls(start_redis):
    return [start_redis().url for _ in range(2)]


@pytest.fixture
def stored(open_driver, urls):
    """A driver of two servers, both of which have objects."""
    driver = open_driver(*urls)
    assert driver.store(*((key, 100 + i) for i, key in enumerate(KEYS)), (OTHERS[0], 7))
    return driver


@pytest.fixture
def service(urls):
    """LMCache's, on a storage manager that has the adapter."""
    l1 = construct_l1(4 << 20, "")
    manager = construct_manager(l1, [TailReplayRedisL2Config.from_dict({"urls": urls})])
    yield ObjectService(SimpleNamespace(storage_manager=manager))
    manager.close()


def pages_of(service, page_size, model_name=None):
    token = None
    while True:
        page = asyncio.run(service.list_objects(Tier.L2, None, model_name, page_size, token))
        assert len(page["entries"]) <= page_size
        yield page["entries"]
        token = page["next_page_token"]
        if token is None:
            return


def test_lmcaches_service_lists_what_both_servers_have_and_deletes_it(service, stored):
    listed = {}
    for entries in pages_of(service, 7):
        for entry in entries:
            listed[entry.key.to_object_key()] = entry.size_bytes
    assert listed == {key: 100 + i for i, key in enumerate(KEYS)} | {OTHERS[0]: 7}
    (only,) = (page for page in pages_of(service, 7, OTHERS[0].model_name) if page)
    assert [entry.key.to_object_key() for entry in only] == OTHERS
    keys = [key.to_encoded_object_key() for key in listed]
    assert asyncio.run(service.delete_objects(Tier.L2, None, keys))["ok"]
    assert [entry for page in pages_of(service, 7) for entry in page] == []


@pytest.mark.parametrize("page_size", [1, 2, 5000])
def test_pages_of_any_size_have_everything(stored, page_size):
    """A SCAN that brings more than there is room for loses nothing."""
    found, cursor, pages = [], None, 0
    while True:
        page = stored.adapter.list_l2_keys(page_size=page_size, cursor=cursor)
        assert len(page.entries) <= page_size
        found += [entry.key.to_object_key() for entry in page.entries]
        pages, cursor = pages + 1, page.next_page_token
        if cursor is None:
            break
    assert set(found) == {*KEYS, *OTHERS}
    assert len(found) == len(set(found))
    assert page_size < 5000 or pages == 1


def test_what_is_no_object_of_ours_is_not_listed(driver, redis):
    driver.store((KEYS[0], 10))
    prefix = b"tailreplay:o:"
    redis.call(b"SET", redis_key(prefix.decode(), KEYS[1]), b"rubbish")
    redis.call(b"SET", redis_key(prefix.decode(), KEYS[2]), b"r" * 32)
    redis.call(b"HSET", redis_key(prefix.decode(), KEYS[3]), b"a", b"field")
    redis.call(b"SET", prefix + b"\xff@1", b"no name")
    redis.call(b"SET", b"someone else's", b"value")
    page = driver.adapter.list_l2_keys()
    assert [entry.key.to_object_key() for entry in page.entries] == KEYS[:1]
    assert page.next_page_token is None


def test_among_much_else_pages_are_short_and_end_all_the_same(driver, redis):
    redis.pipeline([(b"SET", b"else %d" % i, b"") for i in range(2000)])
    driver.store((KEYS[0], 10))
    pages, cursor, found = 0, None, 0
    while pages == 0 or cursor is not None:
        page = driver.adapter.list_l2_keys(page_size=5, cursor=cursor)
        pages, cursor, found = pages + 1, page.next_page_token, found + len(page.entries)
    assert found == 1
    assert 1 < pages <= 5


def test_sealed_objects_have_the_size_of_their_payload(open_driver, redis_server, tmp_path):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    driver = open_driver(redis_server.url, seal_key_files=[tmp_path / "key"])
    driver.store((KEYS[0], 1234))
    assert [entry.size_bytes for entry in driver.adapter.list_l2_keys().entries] == [1234]


@pytest.mark.parametrize("cursor", ["", "rubbish", "W10=", "WzIsMCxbXV0=", "WzAsLTEsW11d", "é"])
def test_a_cursor_of_somebody_elses_is_refused_as_lmcache_wants_it(service, cursor):
    with pytest.raises(InvalidRequest, match="wanted one that a page ended with"):
        asyncio.run(service.list_objects(Tier.L2, None, None, 5, cursor))


def test_a_page_without_room_is_refused(driver):
    with pytest.raises(ValueError, match="page_size is 0, wanted at least 1"):
        driver.adapter.list_l2_keys(page_size=0)


def test_a_server_that_is_away_is_named(open_driver, start_redis):
    server = start_redis()
    driver = open_driver(server.url)
    server.kill()
    with pytest.raises(ConnectionError, match=server.url.rpartition("/")[2]):
        driver.adapter.list_l2_keys()


@pytest.mark.parametrize("key", [KEYS[0], OTHERS[0]])
def test_a_name_is_of_the_object_that_it_was_made_for(key):
    name = redis_key("tailreplay:o:", key)
    assert object_key_of("tailreplay:o:", name) == key
    assert object_key_of("tailreplay:o:", name + b"@a@b") is None
    assert object_key_of("another:", name) is None


def test_a_pattern_has_no_meaning_beyond_its_text():
    assert pattern_of("a*", None) == rb"a\**"
    assert pattern_of("p:", r"m[x]?\y") == rb"p:m\[x\]\?\\y@*"
