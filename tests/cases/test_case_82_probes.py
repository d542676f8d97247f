"""production-stack#1057, #619: probes that nothing answered, and traffic before a store was ready.

What the binary answers; that a chart's probes are these is shown where the chart is.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import free_port
from test_probes import ask
from waiting import until

WAIT_S = 60

pytestmark = pytest.mark.slow


def status(address, path):
    """Of a page; None while nobody listens."""
    try:
        return ask(address, path)[0]
    except OSError:
        return None


def test_a_store_says_when_traffic_may_come_and_when_no_more(tmp_path):
    http = f"127.0.0.1:{free_port()}"
    listen = f"unix://{tmp_path}/store.sock"
    environment = os.environ | {
        "TAILREPLAY_LISTEN": listen,
        "TAILREPLAY_HTTP_LISTEN": http,
        "TAILREPLAY_POOL_BYTES": str(64 << 20),
    }
    command = [sys.executable, "-P", "-m", "tailreplay.store.cli", "serve"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as store:
        try:
            seen = []

            def is_ready():
                alive, ready = status(http, "/healthz"), status(http, "/readyz")
                seen.append((alive, ready))
                # Never ready before it is alive, and alive as soon as anything answers.
                assert alive == 200 or ready is None or alive is None
                assert ready in (None, 200, 503)
                return ready == 200

            until(is_ready, WAIT_S)
            # Ready means that the very first call is served.
            with grpc.insecure_channel(listen) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                for service in ("", "tailreplay.store.v1.Store"):
                    request = health_pb2.HealthCheckRequest(service=service)
                    assert stub.Check(request, timeout=WAIT_S).status == 1
            assert status(http, "/metrics") == 200
            # What it makes from here on, as files of a bulk tier, is for its own user.
            assert "Umask:\t0077" in Path(f"/proc/{store.pid}/status").read_text()
            store.send_signal(signal.SIGTERM)
            assert store.wait(WAIT_S) == 0
            assert status(http, "/readyz") is None
        finally:
            store.kill()
