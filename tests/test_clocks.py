"""Wall clocks step; whatever ends, stalls or expires goes by one that only grows."""

import ast
import os
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
from store_objects import Client, Prefix
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.namespace import tenant_digest

ROOT = Path(__file__).parent.parent
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
TOLD_TO_PEOPLE = {
    "store/core.py": 1,
    "store/cli_command.py": 1,
    "store/cli_doctor.py": 2,
    "store/publisher.py": 1,
}
"""Where the time of day is shown, or compared with another machine's."""


def wall_clock_reads(source: str) -> int:
    """How often the time of day is named, called there or handed on to be called elsewhere."""
    return sum(map(_names_the_wall_clock, ast.walk(ast.parse(source))))


def _names_the_wall_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(one.name in WALL["time"] for one in node.names) and node.module == "time"
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return node.attr in WALL.get(name, ())


def test_nothing_is_decided_by_the_time_of_day():
    found = {
        str(path.relative_to(ROOT)): count
        for part in ("store", "connector", "replay")
        for path in (ROOT / part).rglob("*.py")
        if (count := wall_clock_reads(path.read_text(encoding="utf-8")))
    }
    assert found == TOLD_TO_PEOPLE


@pytest.mark.parametrize(
    "source",
    [
        "import time\nif time.time() > 3: pass",
        "import time\ndef over(wall=time.time): return wall() > 3",
        "from time import time as wall",
        "import datetime\nat = datetime.datetime.now",
    ],
)
def test_a_reading_of_the_wall_clock_is_found(source):
    assert wall_clock_reads(source) == 1


ACME = tenant_digest("acme")


@contextmanager
def store_days_ahead(folder: Path, redis_url: str, days: int):
    """A store whose clock is wrong, and a client of it."""
    script = Path(__file__).with_name("clock_child.py")
    address = f"unix://{folder}/ahead.sock"
    command = [sys.executable, "-P", str(script), address, redis_url, str(days)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child, closing(Client(address)) as client:
        assert child.stdout.readline() == "there\n"
        yield client
        child.communicate(timeout=30)
    assert child.returncode == 0


def put(client: Client, raw: redis.Redis) -> Prefix:
    prefix = Prefix(os.urandom(32), range(300), tenant=ACME)
    client.put(prefix)
    until(lambda: not client.stats().redis_pending_bytes)
    until(lambda: raw.exists(b"tailreplay:a:owner:" + prefix.namespace))
    return prefix


def erased(client: Client) -> pb.EraseResponse:
    return client.admin.Erase(pb.EraseRequest(tenant=ACME), timeout=30)


@pytest.mark.redis
def test_a_tenant_is_erased_whatever_clocks_say(redis_server, tmp_path):
    """Its owner stood under a day of the writer's, which nobody else looked at."""
    with closing(redis.Redis.from_url(redis_server.url)) as raw:

        def left(prefix: Prefix) -> list[bytes]:
            named = (prefix.namespace, prefix.namespace.hex().encode())
            return [key for key in raw.keys("*") if any(name in key for name in named)]

        with (
            store_days_ahead(tmp_path, redis_server.url, 10) as ahead,
            serve_in_thread(redis_url=redis_server.url) as store,
            closing(Client(store.address)) as client,
        ):
            one = put(ahead, raw)
            answer = erased(client)
            assert (answer.namespaces, answer.stores, answer.silent_stores) == (1, 1, 0)
            assert ahead.match(one).matched_tokens == 0
            assert not left(one)
            other = put(ahead, raw)
        # As the same store is once its clock is right.
        with (
            serve_in_thread(redis_url=redis_server.url) as store,
            closing(Client(store.address)) as client,
        ):
            request = pb.ListTenantsRequest(tenant=ACME)
            until(lambda: client.admin.ListTenants(request).tenants[0].redis_bytes)
            answer = erased(client)
            assert (answer.namespaces, answer.redis_keys_left) == (2, 0)  # once more the first
            assert client.match(other).matched_tokens == 0
            assert not left(other)
