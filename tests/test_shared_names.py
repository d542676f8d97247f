"""What engines call a namespace outlives a store that keeps it under a name of its own."""

from contextlib import closing

import pytest
import redis
from store_objects import Prefix, put_frames
from tokens_file import TENANTS, write_tokens
from waiting import until

from tailreplay.store.auth import ADMINISTRATOR, Principal, Role
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store

pytestmark = pytest.mark.redis

SENT = bytes(range(32))
PREFIX = Prefix(SENT, range(300))
ACME = Principal(Role.TENANT, "acme")


@pytest.fixture
def open_store(tmp_path, redis_server):
    """Opens a store on Redis; with tokens and a key file, unless told otherwise."""
    tokens = write_tokens(tmp_path / "tokens.json", **TENANTS)
    secret = tmp_path / "digest.key"
    secret.write_bytes(b"k" * 32)

    def opened(**settings):
        settings = {
            "listen": f"unix://{tmp_path}/s.sock",
            "pool_bytes": 8 << 20,
            "redis_url": redis_server.url,
            "token_file": tokens,
            "digest_key_file": secret,
        } | settings
        return closing(Store(StoreConfig(**settings)))

    return opened


def put(store: Store, *caller: Principal) -> None:
    store.put(put_frames(PREFIX), lambda: None, *caller)
    until(lambda: not store.stats().redis_pending_bytes)


def names(store: Store, *caller: Principal) -> dict[bytes, bytes]:
    return {one.namespace: one.sent_namespace for one in store.describe(*caller).namespaces}


def everything_in(url: str) -> bytes:
    with closing(redis.Redis.from_url(url)) as raw:
        found = []
        for key in raw.keys("*"):
            kind = raw.type(key)
            found.append(key)
            if kind == b"hash":
                found += [part for pair in raw.hgetall(key).items() for part in pair]
            elif kind == b"string":
                found.append(raw.get(key))
            elif kind == b"zset":
                found += raw.zrange(key, 0, -1)
        return b"|".join(found)


def test_a_store_that_starts_again_knows_it_at_once(open_store, redis_server):
    kept = ACME.scoped(SENT)
    with open_store() as store:
        put(store, ACME)
        ledger = store.admin.operators._ledger
        until(lambda: ledger.names_of([kept]) == {kept: SENT})
    assert SENT not in everything_in(redis_server.url)
    assert SENT.hex().encode() not in everything_in(redis_server.url)
    with open_store() as again:
        assert names(again, ADMINISTRATOR) == {kept: SENT}
        assert names(again, ACME) == {SENT: SENT}
        assert names(again, Principal(Role.TENANT, "rival")) == {}


def test_who_has_another_secret_reads_no_name(open_store, tmp_path):
    with open_store() as store:
        put(store, ADMINISTRATOR)
        kept, ledger = ADMINISTRATOR.scoped(SENT), store.admin.operators._ledger
        until(lambda: ledger.names_of([kept]) == {kept: SENT})
    with open_store(digest_key_file=None) as other:
        assert names(other, ADMINISTRATOR) == {kept: b""}


def test_a_store_learns_it_of_another_and_says_it_again_after_a_flush(open_store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    kept = ACME.scoped(SENT)
    with open_store() as store, open_store(listen=f"unix://{other}/s.sock") as reader:
        put(store, ACME)
        ledger = store.admin.operators._ledger
        until(lambda: ledger.names_of([kept]) == {kept: SENT})
        reader.catalog.redis.restore()
        reader.admin._names.ask()
        assert names(reader, ADMINISTRATOR) == {kept: SENT}
        ledger._tables.client.flushall()
        until(lambda: ledger.names_of([kept]) == {kept: SENT})


def test_without_tokens_it_is_the_namespace_itself(open_store, redis_server):
    with open_store(token_file=None) as store:
        put(store)
        store.admin._names._told_at_s = -1e9
        store.admin._names.tick()
        assert not store.admin.operators._ledger.names_of([SENT])
    with open_store(token_file=None) as again:
        assert names(again) == {SENT: SENT}
