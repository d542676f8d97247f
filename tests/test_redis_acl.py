"""The rights that docs/redis.md asks for are enough, and no more than what is used is refused."""

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer
from store_objects import Client, Prefix, span_range
from typer.testing import CliRunner
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

PAGE = Path(__file__).parent.parent / "docs" / "redis.md"
BASE = list(range(600))


def rights() -> list[str]:
    """The words of the page's ACL SETUSER."""
    (found,) = re.findall(r"ACL SETUSER tailreplay((?:.|\n)*?)\n\n", PAGE.read_text())
    return found.split()


@pytest.fixture
def password(tmp_path):
    file = tmp_path / "password"
    file.write_text("PASSWORD")
    return file


@pytest.fixture
def server():
    with closing(RedisServer()) as server, closing(redis.Redis.from_url(server.url)) as raw:
        raw.execute_command("ACL", "SETUSER", "tailreplay", *rights())
        yield server, raw


def test_a_store_does_all_it_does_with_the_rights_of_the_page(server, password):
    redis_server, raw = server
    settings = {
        "redis_url": redis_server.url,
        "redis_username": "tailreplay",
        "redis_password_file": password,
        "pool_bytes": 8 << 20,
    }
    prefix = Prefix(os.urandom(32), BASE)
    with serve_in_thread(**settings) as first, closing(Client(first.address)) as client:
        assert client.put(prefix).dropped == 0
        for number in range(40):  # so that children are looked through as well
            client.put(Prefix(prefix.namespace, [7_000_000 + number]), [(Kind.KV, 0, 1)])
        until(lambda: client.stats().redis_pending_bytes == 0)
        lost = first.store.catalog.record(prefix.name(Kind.KV, 600))
        first.store.catalog.lost(lost)
        first.store.tiers.delete([lost.name])
    with serve_in_thread(**settings) as second, closing(Client(second.address)) as client:
        fetched = client.fetch(prefix, span_range(Kind.KV, 0, 512))
        assert fetched.rows == {0: prefix.rows(Kind.KV, 0, 512)}
        other = Prefix(prefix.namespace, [*BASE[:300], 9, 9])
        assert client.match(other).matched_tokens == 300
        second.store.catalog.redis.renew_used()
    denied = [f"{entry['object']} ({entry['reason']})" for entry in raw.acl_log()]
    assert denied == []


def test_doctor_looks_at_redis_with_the_rights_that_the_page_calls_optional(
    server, password, monkeypatch
):
    redis_server, raw = server
    raw.set("tailreplay:x:m:1", b"1", px=60_000)
    monkeypatch.setenv("TAILREPLAY_REDIS_USERNAME", "tailreplay")
    monkeypatch.setenv("TAILREPLAY_REDIS_PASSWORD_FILE", str(password))
    words = ["doctor", "--redis-url", redis_server.url, "--format", "json"]

    def found() -> dict[str, tuple[str, str]]:
        checks = json.loads(CliRunner().invoke(app, words).stdout)["checks"]
        return {check["check"]: (check["state"], check["todo"]) for check in checks}

    assert "redis lives" not in found()
    state, todo = found()["redis"]
    assert (state, "rights +info and +time too" in todo) == ("warn", True)
    (optional,) = re.findall(r"`(.*)` are optional, for `doctor", PAGE.read_text())
    raw.execute_command("ACL", "SETUSER", "tailreplay", *optional.split())
    assert found()["redis lives"] == ("ok", "")
