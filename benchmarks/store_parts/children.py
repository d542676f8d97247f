"""Child processes that answer commands on their pipes, and what processes cost.

A child reads one JSON object per line on standard input and answers each with one on standard
output; the first line it writes says that it is ready. It ends when its input does, so that
nothing outlives the benchmark. Whatever else it prints goes to standard error.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

Answer = dict[str, Any]
Handler = Callable[..., Answer]

ROOT = Path(__file__).resolve().parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Python of the peers, which have an environment of their own."""

_ANSWERS_FD = 9
_PROGRAM = ROOT / "benchmarks" / "store.py"
_QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "GLOG_minloglevel": "2",
}


class ChildFailed(Exception):
    """A child ended or answered with an error; the message has its last words."""


class Child:
    """One running child of this program.

    Args:
        role: what it does, a key of `store.ROLES`.
        python: interpreter, for those that need another environment.
        environment: variables of its own, beside this process's.
        **settings: what its role takes.

    Attributes:
        pid: its process.
        facts: what it said when it was ready.

    Raises:
        ChildFailed: it did not get ready.
    """

    def __init__(
        self,
        role: str,
        *,
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **settings: Any,  # noqa: ANN401 - JSON
    ) -> None:
        self._role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        command = [str(python), "-P", str(_PROGRAM), "--child", role, json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _QUIET | dict(environment or {}),
        )
        self.pid = self._process.pid
        try:
            self.facts = self._read()
        except ChildFailed:
            self.close()
            raise

    def ask(self, op: str, **arguments: Any) -> Answer:  # noqa: ANN401 - JSON
        """Has the child do something and waits for its answer.

        Raises:
            ChildFailed: it could not.
        """
        self.send(op, **arguments)
        return self._read()

    def send(self, op: str, **arguments: Any) -> None:  # noqa: ANN401 - JSON
        """As `ask`, but the answer is fetched with `answer`, so that others can work meanwhile."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildFailed(f"{self._role}: gone\n{self._last_words()}") from error

    def answer(self) -> Answer:
        """The answer to what was sent."""
        return self._read()

    def close(self) -> None:
        """Ends it; kills it if it does not end by itself."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(15)
            raise ChildFailed(f"{self._role}: ended\n{self._last_words()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self._role}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-1500:].decode(errors="replace")


def keep_stdout_clean() -> None:
    """Called first in a child: answers get a descriptor of their own, prints go to the log."""
    os.dup2(1, _ANSWERS_FD)
    os.dup2(2, 1)


def answer_commands(facts: Answer, handlers: dict[str, Handler]) -> None:
    """The child's side: says what it is, then answers commands until its input ends."""
    pipe = os.fdopen(_ANSWERS_FD, "w", closefd=False)
    _write(pipe, facts)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = handlers[command.pop("op")](**command)
        except Exception as error:  # noqa: BLE001 - the parent decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(pipe, answer)


def cpu_s(*pids: int) -> float:
    """CPU seconds that processes have used, threads that ended included."""
    # Linux makes the clock of another process's CPU time from its id.
    return sum(time.clock_gettime(((~pid) << 3) | 2) for pid in pids)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process now, its share of shared memory included."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, f"process {pid} has no VmRSS"
    return int(found[1]) << 10


def wait_for_port(port: int, process: subprocess.Popen[bytes], limit_s: float = 40) -> None:
    """Returns once something listens on a loopback port.

    Raises:
        ChildFailed: the process ended, or nothing listened in time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.connect(("127.0.0.1", port))
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            break
    raise ChildFailed(f"{process.args!r}: nothing listens at port {port}")


def start(*command: str | Path) -> subprocess.Popen[bytes]:
    """A program in the background, silent; end it with `stop`."""
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | _QUIET,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a program that `start` started."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _write(pipe: TextIO, answer: Answer) -> None:
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()
