"""A store that encrypts what it keeps in Redis: keys are changed, ciphertexts are exchanged."""

from contextlib import closing, contextmanager

import pytest
import redis
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

A, B = (Prefix(bytes([i]) * 32, list(range(256 * i, 256 * i + 600))) for i in (1, 2))
MIB = 1 << 20


@pytest.fixture
def keys(tmp_path):
    files = [tmp_path / name for name in ("old.key", "new.key")]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 32)
    return files


@pytest.fixture
def raw(redis_server):
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def open_client(redis_server):
    @contextmanager
    def open_one(*files):
        settings = {"redis_url": redis_server.url, "pool_bytes": 4 * MIB}
        with (
            serve_in_thread(redis_seal_key_files=files, **settings) as served,
            closing(Client(served.address)) as client,
        ):
            yield client

    return open_one


def kept(client: Client, prefix: Prefix) -> None:
    assert client.put(prefix).dropped == 0
    until(lambda: not client.stats().redis_pending_bytes)
    assert any(t.tier == pb.TIER_REDIS and t.objects for t in client.stats().tiers)


def comes_back(client: Client, prefix: Prefix) -> bool:
    if client.match(prefix).matched_tokens < 600:
        return False
    fetched = client.fetch(prefix, span_range(Kind.KV, 0, 600), span_range(Kind.HIDDEN, 0, 600))
    assert not fetched.missing
    assert {frame.tier for frame in fetched.frames} == {pb.TIER_REDIS}
    return fetched.rows == {0: prefix.rows(Kind.KV, 0, 600), 1: prefix.rows(Kind.HIDDEN, 0, 600)}


def everything_in(raw: redis.Redis) -> bytes:
    values = []
    for key in raw.keys("*"):
        kind = raw.type(key)
        values += {
            b"string": lambda key=key: [raw.get(key)],
            b"hash": lambda key=key: list(raw.hgetall(key).values()),
            b"zset": lambda: [],  # running digests, which no key encrypts: format.md
        }[kind]()
    return b"".join(values)


def test_keys_are_changed_without_losing_what_the_old_one_sealed(open_client, keys, raw):
    old, new = keys
    with open_client(old) as client:
        kept(client, A)
        rows = A.rows(Kind.KV, 0, 256)
        in_redis = everything_in(raw)
        assert len(in_redis) > len(rows)
        assert not any(rows[i : i + 16] in in_redis for i in range(0, len(rows), 64))
        assert A.digests[:64] not in in_redis
    with open_client(new, old) as client:
        assert comes_back(client, A)
        kept(client, B)
    with open_client(new) as client:
        assert comes_back(client, B)
        assert client.match(A).matched_tokens == 0
    for files in ([], [old]):
        with open_client(*files) as client:
            assert client.match(B).matched_tokens == 0
    with open_client(new, old) as client:  # nobody has deleted what others can read
        assert comes_back(client, A)
        assert comes_back(client, B)


def test_two_ciphertexts_exchanged_are_two_misses(open_client, keys, raw):
    with open_client(keys[0]) as client:
        kept(client, A)
        kept(client, B)
    pattern = "tailreplay:sealed:o:{}|kv@*{}"
    names = [p.name(Kind.KV, 256) for p in (A, B)]
    first, second = (
        raw.keys(pattern.format(name.namespace.hex(), name.prefix_hash.hex()))[0] for name in names
    )
    values = raw.mget(first, second)
    assert len(values[0]) == len(values[1])
    raw.mset({first: values[1], second: values[0]})
    with open_client(keys[0]) as client:
        for prefix in (A, B):
            fetched = client.fetch(prefix, span_range(Kind.KV, 0, 256))
            assert fetched.missing[0].reason == pb.MISS_REASON_INTEGRITY
            assert not fetched.rows
        assert client.stats().integrity_errors == 2
        assert raw.exists(first, second) == 0


def test_two_manifests_exchanged_are_two_misses(open_client, keys, raw):
    with open_client(keys[0]) as client:
        kept(client, A)
        kept(client, B)
    first, second = (
        b"tailreplay:sealed:m:" + p.namespace + p.chain.prefix_hash(256) for p in (A, B)
    )
    for words in ((first, b"spare"), (second, first), (b"spare", second)):
        raw.rename(*words)
    with open_client(keys[0]) as client:
        assert client.match(A).matched_tokens == client.match(B).matched_tokens == 0


def test_a_key_file_that_is_none_is_refused_without_its_content(tmp_path):
    file = tmp_path / "short.key"
    file.write_bytes(b"secret of 19 bytes.")
    with pytest.raises(ValueError, match="19 bytes, wanted 32") as refused:
        StoreConfig(redis_seal_key_files=(file,))
    assert "secret" not in str(refused.value)
