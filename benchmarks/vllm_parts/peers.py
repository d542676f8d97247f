"""vLLM with LMCache's multi-process connector, and the server that it talks to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loopback import free_port
from vllm_engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S = 120
ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
}
MODES = ("engine_driven", "lmcache_driven")
"""LMCache's ways of moving KV; on CPUs the first is its default."""


@contextmanager
def lmcache_engine(model: Path, folder: Path, mode: str) -> Iterator[Engine]:
    """An engine with LMCache's connector and prefix caching, which it wants for hybrids.

    Raises:
        AssertionError: server or engine did not start.
    """
    wanted = ENVIRONMENT | {"LMCACHE_MP_TRANSFER_MODE": mode}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with ExitStack() as stack:
            port = stack.enter_context(_server(folder, mode))
            engine = Engine(
                model,
                None,
                folder,
                enable_prefix_caching=True,
                lmcache_shim=True,
                kv_transfer_config={
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": port,
                    },
                },
            )
            stack.callback(engine.close)
            yield engine
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _server(folder: Path, mode: str) -> Iterator[int]:
    """`lmcache server` as its documentation starts it for hybrids; yields its port."""
    port, http, metrics = (free_port() for _ in range(3))
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--http-host": "127.0.0.1",
        "--http-port": str(http),
        "--prometheus-port": str(metrics),
        "--l1-size-gb": "1",
        "--eviction-policy": "LRU",
        "--chunk-size": "256",
        "--supported-transfer-mode": mode,
    }
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--separate-object-groups"]
    for name, value in flags.items():
        command += [name, value]
    with (folder / "lmcache.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{http}/healthcheck", process)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.5)
    raise AssertionError("lmcache server did not come up")
