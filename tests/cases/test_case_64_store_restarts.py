"""LMCache#4642, #4670, #3206: a restarted server needed its engines restarted, or 127 s."""

import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

import lane_objects
import pytest
from lane_objects import WAIT_S
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import Kind

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGES = [span_range(Kind.KV, 0, 700), span_range(Kind.HIDDEN, 100, 700)]
BACK_S = 5.0


@contextmanager
def store_process(address, redis_url):
    command = [sys.executable, "-P", "-m", "tailreplay.store.cli", "serve", "--listen", address]
    command += ["--redis-url", redis_url, "--pool-bytes", str(64 << 20)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(client, timeout_s=WAIT_S):
    """Matched tokens and boot id; (0, 0) while nobody answers."""
    try:
        answer = client.match(PREFIX.namespace, PREFIX.tokens, timeout_s=timeout_s)
    except TailReplayError:
        return 0, 0
    return answer.matched_tokens, answer.boot_id


def test_hits_resume_after_kill_9_with_the_same_client(redis_server):
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        address = f"unix://{folder}/store.sock"
        with StoreClient(address) as client:
            with store_process(address, redis_server.url) as first:
                assert client.connect(60)
                lane_objects.put(client, PREFIX)
                until(lambda: client.stats().redis_pending_bytes == 0, WAIT_S)
                before = asked(client)
                assert before[0] == 700
                assert lane_objects.fetch(client, PREFIX, *RANGES)[0] == rows()
                first.send_signal(signal.SIGKILL)
                first.wait(WAIT_S)
            assert asked(client, 0.25) == (0, 0)
            with store_process(address, redis_server.url):
                with StoreClient(address) as watch:
                    assert watch.connect(60)
                back_s = time.monotonic()
                until(lambda: asked(client)[0] == 700, BACK_S)
                assert lane_objects.fetch(client, PREFIX, *RANGES)[0] == rows()
                assert time.monotonic() - back_s < BACK_S
                # A restart that nobody saw is told by the boot id of the next answer.
                assert asked(client)[1] not in (0, before[1])


def rows():
    return [lane_objects.rows_of(PREFIX, wanted) for wanted in RANGES]
