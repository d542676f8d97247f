"""The Redis adapter under stock LMCache: its own benchmark, and its own server, restarted."""

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from loopback import free_port
from waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow]

DOCS = Path(__file__).resolve().parent.parent / "docs" / "lmcache.md"
LMCACHE = [sys.executable, "-P", "-m", "lmcache.cli.main"]
SHAPE = "(2,512,16,8,64):bfloat16:4"


def adapter(url: str) -> str:
    """What docs/lmcache.md tells operators to configure, with another URL."""
    spec = json.loads(re.search(r"--l2-adapter '(.*?)'", DOCS.read_text(), re.DOTALL)[1])
    spec["adapter_params"]["url"] = url
    return json.dumps(spec)


def lmcache(tmp_path: Path, *words: str) -> str:
    """What a command of LMCache prints; run elsewhere, so that nothing of ours shadows its own."""
    done = subprocess.run(
        [*LMCACHE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def server(tmp_path: Path, redis_url: str):
    """A stock server; yields its request and HTTP ports."""
    port, http_port, metrics_port = (free_port() for _ in range(3))
    command = [*LMCACHE, "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
    command += ["--prometheus-port", str(metrics_port), "--l1-size-gb", "0.125"]
    command += ["--eviction-policy", "LRU", "--chunk-size", "256"]
    command += ["--supported-transfer-mode", "engine_driven", "--l2-adapter", adapter(redis_url)]
    with (
        (tmp_path / "log").open("a") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as process,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return status(http_port, "healthcheck") is not None
            except OSError:
                return False

        try:
            until(is_ready, limit_s=100)
            yield port, http_port
        finally:
            process.terminate()
            process.wait(60)


def status(http_port: int, page: str = "status") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/{page}", timeout=20) as answer:
        return answer.read().decode()


def listed(http_port: int) -> list[dict]:
    """What the server says is in Redis, asked for in pages of three."""
    entries, token = [], ""
    while True:
        page = json.loads(status(http_port, f"cache/objects?page_size=3{token}"))
        entries += page["entries"]
        if page["next_page_token"] is None:
            return entries
        token = "&page_token=" + quote(page["next_page_token"])


def test_lmcaches_own_benchmark_of_adapters_verifies_every_byte(redis_server, tmp_path):
    words = ["--num-keys", "8", "--in-flight", "2", "--data-size-kb", "512", "--rounds", "2"]
    words += ["--lookup-max-hit-rate", "1.0", "--no-skip-verify"]
    told = lmcache(tmp_path, "bench", "l2", "--l2-adapter", adapter(redis_server.url), *words)
    assert "All 16 keys data verified OK" in told
    assert "TailReplayRedisL2" in told


@pytest.mark.timeout(400)
def test_a_stock_server_keeps_its_cache_in_redis_over_a_restart(redis_server, tmp_path):
    words = ["--mode", "cpu", "--transfer-mode", "engine_driven", "--num-tokens", "1024"]
    words += ["--kvcache-shape-spec", SHAPE, "--start", "100", "--end", "102"]
    words += ["--interval", "0", "--flamegraph", "off"]
    with redis.Redis(port=redis_server.port) as raw:
        gets = []
        for stored in (2, 0):  # the second time all is found, and nothing stored again
            with server(tmp_path, redis_server.url) as (port, http_port):
                urls = ["--rpc-url", f"tcp://127.0.0.1:{port}"]
                urls += ["--url", f"http://127.0.0.1:{http_port}"]
                told = lmcache(tmp_path, "bench", "server", *urls, *words)
                assert re.search(rf"Checksum OK:\s+{stored}\n", told), told
                assert re.search(r"Checksum FAIL:\s+0\n", told), told
                assert re.search(r"Warm Retrieve \(ms\) -*\ncount:\s+2\n", told), told
                until(lambda: raw.dbsize() == 8)
                assert len(listed(http_port)) == 8
                assert '"integrity_errors":0' in status(http_port).replace(" ", "")
            gets.append(raw.info("commandstats").get("cmdstat_get", {}).get("calls", 0))
    assert gets[0] == 0
    assert gets[1] >= 8  # a stock server drops what it loaded, and loads it again
