"""LMCache's file-system adapter beside Redis, end to end."""

import os
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
from store_objects import Client, Prefix, span_range
from typer.testing import CliRunner
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.bulk_files import BulkFiles
from tailreplay.store.bulk_tier import BulkTierConfig
from tailreplay.store.cli import app
from tailreplay.store.config import StoreConfig
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

PREFIX = Prefix(bytes([7]) * 32, list(range(600)))
MIB = 1 << 20
ACME = tenant_digest("acme")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "bulk"


@pytest.fixture
def raw(redis_server):
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def opened(redis_server, folder):
    @contextmanager
    def open_one():
        tiers = ({"type": "fs", "base_path": str(folder)},)
        settings = {"redis_url": redis_server.url, "bulk_tiers": tiers, "pool_bytes": 4 * MIB}
        with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
            yield served.store, client

    return open_one


def files(folder: Path, kind: Kind = Kind.KV) -> list[Path]:
    return sorted(folder.glob(f"*{kind.name.lower()}@*.data"))


def put(client: Client, folder: Path) -> None:
    assert client.put(PREFIX).dropped == 0
    until(lambda: not client.stats().redis_pending_bytes)
    until(lambda: len(list(folder.glob("*.data"))) == len(PREFIX.spans()))


def lose_payloads(raw: redis.Redis) -> None:
    """Redis keeps its manifests and loses the rest, as one without room for it would."""
    keys = raw.keys("tailreplay:o:*")
    assert keys
    raw.delete(*keys)


def fetched(client: Client):
    return client.fetch(PREFIX, span_range(Kind.HIDDEN, 0, 600), span_range(Kind.KV, 0, 600))


def all_came(client: Client) -> bool:
    got = fetched(client)
    rows = {0: PREFIX.rows(Kind.HIDDEN, 0, 600), 1: PREFIX.rows(Kind.KV, 0, 600)}
    return not got.missing and got.rows == rows


def test_what_left_memory_comes_back_from_files_also_after_a_restart(opened, folder, raw):
    with opened() as (store, client):
        put(client, folder)
        lose_payloads(raw)
        store.catalog.room.make(4 * MIB)
        assert {run.tier for run in client.match(PREFIX).runs} == {pb.TIER_REDIS}
        assert all_came(client)
    with opened() as (_, client):
        assert client.match(PREFIX).matched_tokens == 600
        assert all_came(client)


def test_a_redis_that_refuses_payloads_leaves_them_to_the_files(opened, folder, raw):
    raw.execute_command("ACL", "SETUSER", "default", "-set")
    with opened() as (store, client):
        put(client, folder)
        assert store.tiers.redis_status()["refused"] == len(PREFIX.spans())
        assert not raw.keys("tailreplay:o:*")
        store.catalog.room.make(4 * MIB)
        assert all_came(client)


def test_what_no_place_takes_stays_in_memory_alone(opened, folder, raw):
    raw.execute_command("ACL", "SETUSER", "default", "-set")
    with opened() as (store, client):
        folder.rmdir()
        folder.touch()  # a file, in which nothing can be stored
        assert client.put(PREFIX).dropped == 0
        until(lambda: not client.stats().redis_pending_bytes)
        assert not [t for t in client.stats().tiers if t.tier == pb.TIER_REDIS and t.objects]
        assert store.catalog.room.make(4 * MIB)


def test_a_damaged_or_cut_file_is_an_integrity_miss_and_goes(opened, folder, raw):
    with opened() as (store, client):
        put(client, folder)
        lose_payloads(raw)
        store.catalog.room.make(4 * MIB)
        flipped, cut, _ = files(folder)
        data = flipped.read_bytes()
        flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        cut.write_bytes(cut.read_bytes()[:-1])
        got = client.fetch(PREFIX, *(span_range(Kind.KV, at, at + 1) for at in (0, 256, 512)))
        reasons = [missing.reason for missing in got.missing.values()]
        assert reasons == [pb.MISS_REASON_INTEGRITY] * 2
        assert len(got.rows) == 1
        assert client.stats().integrity_errors == 2
        until(lambda: not flipped.exists() and not cut.exists())
        put(client, folder)  # the holes can be filled
        assert all_came(client)
        assert client.stats().pinned_bytes == 0


def test_what_is_deleted_goes_from_files_too(opened, folder):
    with opened() as (store, client):
        put(client, folder)
        name = PREFIX.name(Kind.KV, 256)
        store.tiers.delete([name])
        until(lambda: len(files(folder)) == 2)


def erased(store) -> pb.EraseResponse:
    return store.admin.forgetter.erase(pb.EraseRequest(tenant=ACME))


@pytest.mark.parametrize("what", ["tailreplay:[mo]:*", "*"], ids=["expired", "flushed"])
def test_files_of_which_no_index_knows_are_erased(opened, folder, raw, what):
    """They outlive their manifests: an erasure counted nothing, and left them all."""
    mine = Prefix(os.urandom(32), range(600), tenant=ACME)
    with opened() as (_, client):
        put(client, folder)
        assert client.put(mine).dropped == 0
        until(lambda: len(list(folder.glob("*.data"))) == 2 * len(mine.spans()))
        until(lambda: raw.exists(b"tailreplay:a:owner:" + mine.namespace))
    raw.delete(*raw.keys(what))
    begun = folder / f"{mine.namespace.hex()}|kv@0x00000000@0@{'ab' * 32}.tmp"
    begun.touch()
    with opened() as (store, _):
        answer = erased(store)
    assert (answer.namespaces, answer.redis_keys_left) == (1, 0)
    assert (answer.bulk_files_deleted, answer.bulk_files_left) == (len(mine.spans()) + 1, 0)
    assert not [path for path in folder.iterdir() if mine.namespace.hex() in path.name]
    assert len(list(folder.glob("*.data"))) == len(PREFIX.spans())


def test_files_say_whose_they_are_for_as_long_as_there_are_any(tmp_path):
    files, space, other = BulkFiles([tmp_path]), PREFIX.namespace, bytes([9]) * 32
    files.own({space: ACME, other: tenant_digest("other")})
    files.own({space: ACME})
    assert files.namespaces_of(ACME) == {space}
    stuck = tmp_path / f"{space.hex()}|kv@0x00000000@0@{'ab' * 32}.data"
    stuck.mkdir()
    assert files.delete([space], None) == (0, 1)
    assert files.namespaces_of(ACME) == {space}
    stuck.rmdir()
    assert files.delete([space], None) == (0, 0)
    assert files.namespaces_of(ACME) == set()
    assert files.namespaces_of(tenant_digest("other")) == {other}


def test_files_that_can_not_be_deleted_are_left_and_said_to_be(tmp_path):
    """Of some prefixes too; a folder stands in for a file that nobody may delete."""
    stuck, other = bytes([1]) * 32, bytes([2]) * 32
    for name in (stuck, other):
        (tmp_path / f"{PREFIX.namespace.hex()}|kv@0x00000000@0@{name.hex()}.data").mkdir()
    (tmp_path / f"{PREFIX.namespace.hex()}|kv@0x00000000@0@{'ab' * 32}.data").touch()
    files = BulkFiles([tmp_path, tmp_path / "none"])
    assert files.delete([PREFIX.namespace], [stuck]) == (0, 1)
    assert files.delete([bytes(32)], None) == (0, 0)
    assert files.delete([PREFIX.namespace], None) == (1, 2)


def test_what_a_tier_has_that_can_not_be_listed_is_not_proved_to_be_gone(redis_server):
    tiers = ({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100},)
    mine = Prefix(os.urandom(32), range(600), tenant=ACME)
    with (
        serve_in_thread(redis_url=redis_server.url, bulk_tiers=tiers) as served,
        closing(Client(served.address)) as client,
    ):
        client.put(mine)
        until(lambda: not client.stats().redis_pending_bytes)
        done = CliRunner().invoke(app, ["erase", "acme", "--url", served.address])
    assert done.exit_code == 1
    assert "can not be listed" in done.stderr
    assert "unlisted_bulk_tiers  1" in done.stdout


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    tier = {"type": "fs", "base_path": "/x"}
    with pytest.raises(ValueError, match="without redis_url"):
        StoreConfig(bulk_tiers=(tier,))
    with pytest.raises(ValueError, match="not encrypted"):
        StoreConfig(bulk_tiers=(tier,), redis_url="redis://h", redis_seal_key_files=(key,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "../fs"}, "LMCache has none"),
        ({"type": "fs"}, "base_path"),
        ({"type": "fs", "base_path": "/x", "serde": {"type": "fp8"}}, "serde"),
    ],
)
def test_a_bulk_tier_that_makes_no_sense_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        BulkTierConfig.from_dict(spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "s3", "s3_endpoint": "s3://bucket", "s3_region": "eu-west-1"},
        {"type": "mooncake_store"},
    ],
    ids=["s3", "mooncake"],
)
def test_other_adapters_are_a_matter_of_configuration(spec):
    assert BulkTierConfig.from_dict(spec).inner is not None


def test_credentials_of_a_bulk_tier_are_not_described():
    tier = {"type": "s3", "aws_secret_access_key": "hush"}
    config = StoreConfig(redis_url="redis://:hush@h", bulk_tiers=(tier,))
    assert config.in_words()["bulk_tiers"] == '["s3"]'
    assert "hush" not in str(config.in_words())
