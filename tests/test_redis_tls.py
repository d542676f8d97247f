"""Redis under TLS with certificates on both sides, a user of its own, and a database."""

import logging
import re
from contextlib import closing
from pathlib import Path

import pytest
import redis
from certificates import Authority
from redis_server import speaks_tls
from store_objects import Client, Prefix, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.objects import Kind
from tailreplay.store.redis_l2 import TailReplayRedisL2
from tailreplay.store.redis_settings import redis_tier

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(not speaks_tls(), reason="this redis-server was built without TLS"),
]

PREFIX = Prefix(bytes(32), list(range(600)))
DOCS = Path(__file__).resolve().parent.parent / "docs" / "redis.md"
RIGHTS = re.search(r">PASSWORD (.*?)\n\n", DOCS.read_text(), re.DOTALL)[1].split()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority):
    """Settings for a client of the authority's servers."""
    cert, key = authority.issue("store")
    return {"redis_ca_file": authority.cert, "redis_cert_file": cert, "redis_key_file": key}


def raw_client(server, files, **more) -> redis.Redis:
    return redis.Redis(
        port=server.port,
        ssl=True,
        ssl_ca_certs=str(files["redis_ca_file"]),
        ssl_certfile=str(files["redis_cert_file"]),
        ssl_keyfile=str(files["redis_key_file"]),
        **more,
    )


def health_of(**settings) -> dict:
    with closing(TailReplayRedisL2(redis_tier(StoreConfig(**settings)))) as adapter:
        return adapter.report_status()


def test_a_store_lives_on_its_few_rights_under_tls_and_tells_nobody_the_password(
    start_redis, authority, files, tmp_path, caplog
):
    caplog.set_level(logging.DEBUG)
    server = start_redis(tls=authority)
    with closing(raw_client(server, files, db=3)) as raw:
        raw.execute_command("ACL", "SETUSER", "cache", "on", ">s3cret word", *RIGHTS)
        secret = tmp_path / "password"
        secret.write_text("s3cret word\n")
        settings = files | {
            "redis_url": f"{server.url}/3",
            "redis_username": "cache",
            "redis_password_file": secret,
            "pool_bytes": 4 << 20,
        }
        told = ""
        for number in range(2):
            with serve_in_thread(**settings) as served, closing(Client(served.address)) as client:
                if not number:
                    client.put(PREFIX)
                    until(lambda client=client: not client.stats().redis_pending_bytes)
                    tiers = client.stats().tiers
                    kept = [t.objects for t in tiers if t.tier == pb.TIER_REDIS]
                    assert sum(kept) == len(PREFIX.spans())
                assert client.match(PREFIX).matched_tokens == 600
                fetched = client.fetch(PREFIX, span_range(Kind.KV, 0, 600))
                assert fetched.rows == {0: PREFIX.rows(Kind.KV, 0, 600)}
                told += str(client.stub.Describe(pb.DescribeRequest()))
                told += repr(served.store.tiers.redis_status()) + repr(served.store.config)
        assert {frame.tier for frame in fetched.frames} == {pb.TIER_REDIS}
        assert raw.dbsize() > 0
        assert "s3cret" not in told + caplog.text
        assert f"rediss://127.0.0.1:{server.port}/3" in told


def test_a_server_that_anothers_authority_vouches_for_is_refused(
    start_redis, authority, files, tmp_path
):
    server = start_redis(tls=authority)
    stranger = Authority(tmp_path, "stranger")
    status = health_of(redis_url=server.url, **files | {"redis_ca_file": stranger.cert})
    assert not status["is_healthy"]
    assert "CERTIFICATE_VERIFY_FAILED" in status["shards"][0]["last_error"]


def test_a_server_of_another_name_is_refused(start_redis, authority, files):
    server = start_redis(tls=authority, bind="127.0.0.1 127.0.0.2")
    url = f"rediss://127.0.0.2:{server.port}"
    assert "IP address mismatch" in health_of(redis_url=url, **files)["shards"][0]["last_error"]


def test_a_server_that_wants_a_certificate_gets_none_from_us_without_one(
    start_redis, authority, files
):
    server = start_redis(tls=authority)
    assert health_of(redis_url=server.url, **files)["is_healthy"]
    assert not health_of(redis_url=server.url, redis_ca_file=files["redis_ca_file"])["is_healthy"]
    assert not health_of(redis_url=server.url.replace("rediss", "redis"), **files)["is_healthy"]
