"""Two OpenAI servers that share one store, as an operator would run them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from redis_server import RedisServer
from vllm_engine import environment, transfer_config
from waiting import until

from tailreplay.connector import StoreClient

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


class Process:
    """A child process with a log, ended with all its own."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=env, start_new_session=True
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


class Server(Process):
    """`vllm serve` on a free port of loopback."""

    def __init__(self, model: Path, store: str, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        flags = {
            "model": str(model),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": str(self.port),
            "max-model-len": "4096",
            "max-num-batched-tokens": "2048",
            "kv-transfer-config": json.dumps(transfer_config(store, match_timeout_s=2.0)),
        }
        for name, value in flags.items():
            command += [f"--{name}", value]
        command += [
            "--skip-tokenizer-init",
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--no-enable-prefix-caching",
            "--disable-uvicorn-access-log",
        ]
        env = environment(folder) | {"VLLM_LOGGING_LEVEL": "INFO"}
        super().__init__(command, folder / f"server-{self.port}.log", env)

    def wait(self) -> None:
        until(lambda: not self.alive() or self._listens(), 280)
        assert self.alive(), f"the server did not come up:\n{self.log.read_text()[-4000:]}"
        assert self.get("/health") == ""

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int]) -> tuple[list[int], int]:
        """Tokens of the answer, and cached tokens of the prompt."""
        return self._complete(prompt)[:2]

    def checkpoint_token(self, prompt: list[int]) -> int:
        """Length of the prefix whose stored state the answer to a prompt begins with."""
        return self._complete(prompt)[2].get("checkpoint_token", 0)

    def _complete(self, prompt: list[int]) -> tuple[list[int], int, dict[str, Any]]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "kv_transfer_params": {"tailreplay": {}},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        details = found["usage"].get("prompt_tokens_details") or {}
        report = (found.get("kv_transfer_params") or {}).get("tailreplay") or {}
        return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0, report

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(name + "{"))


@pytest.fixture(scope="module")
def address(folder: Path) -> str:
    return f"unix://{folder}/store.sock"


class Store:
    """The store of both servers: at most one process, at one address."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self._folder = address, folder
        self._runs: list[Process] = []

    def start(self, redis_url: str | None = None) -> None:
        """Starts it, in place of the one that runs, and waits until it answers."""
        self.kill()
        flags = ["--listen", self.address, "--pool-bytes", str(64 << 20)]
        if redis_url is not None:
            flags += ["--redis-url", redis_url]
        command = [str(Path(sys.executable).parent / "tailreplay-store"), "serve", *flags]
        log = self._folder / f"store{len(self._runs)}.log"
        self._runs.append(Process(command, log, dict(os.environ)))
        with StoreClient(self.address) as client:
            assert client.connect(60), log.read_text()

    def kill(self) -> None:
        """Ends it as a crash would."""
        for run in self._runs:
            run.kill()


@pytest.fixture(scope="module")
def store(folder: Path, address: str) -> Iterator[Store]:
    found = Store(address, folder)
    yield found
    found.kill()


@pytest.fixture(scope="module")
def servers(folder: Path, model: Path, address: str) -> Iterator[list[Server]]:
    """Two servers, started before there is a store."""
    both = [Server(model, address, folder) for _ in range(2)]
    try:
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(count)]


def is_found(server: Server) -> bool:
    """Whether the store answers a prompt's lookup; at first the connector's breaker may be open."""
    server.complete([1, 2, 3])
    return server.metric("vllm:tailreplay_store_up") == 1


def until_stored(server: Server, prompt: list[int]) -> None:
    """Asks until all of a prompt is found in the store, but for its last token."""
    until(lambda: is_found(server), 60)
    until(lambda: server.complete(prompt)[1] == len(prompt) - 1, 60)


def test_case_65_without_a_store_servers_start_serve_and_say_so(servers: list[Server]):
    server = servers[0]
    before = server.metric("vllm:tailreplay_failed_lookups_total")
    answer = server.complete(tokens(300, seed=11))
    assert server.complete(tokens(300, seed=11)) == answer
    assert answer[1] == 0
    assert server.get("/health") == ""
    assert server.metric("vllm:tailreplay_failed_lookups_total") == before + 2
    assert server.metric("vllm:tailreplay_store_up") == 0
    log = server.log.read_text()
    assert "approximate numbers stay out of vLLM's own cache" in log
    assert "does not answer yet: prompts are prefilled until it does" in log


def test_the_second_server_reuses_what_the_first_computed_and_survives_the_store(
    servers: list[Server], store: Store, address: str
):
    one, two = servers
    prompt = tokens(1500, seed=1)
    wanted, cached = one.complete(prompt)
    assert cached == 0

    store.start()
    until_stored(one, prompt)
    until(lambda: is_found(two), 60)
    for m in (1234, 777):
        before = two.metric("vllm:external_prefix_cache_hits_total")
        branch = prompt[:m] + tokens(80, seed=m)
        assert two.complete(branch)[1] == m
        assert two.metric("vllm:external_prefix_cache_hits_total") - before == m

    store.kill()
    for server in servers:
        assert server.complete(prompt) == (wanted, 0)
        assert server.alive()

    store.start()
    until_stored(one, prompt)
    until(lambda: is_found(two), 60)
    assert two.complete(prompt[:1000] + tokens(50, seed=5))[1] == 1000


def until_exact(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """The answer to a prompt of which the store has the state before its last token, too.

    From then on each begins with that state, so that answers can be compared.
    """
    until(lambda: server.checkpoint_token(prompt) == len(prompt) - 1, 60)
    return server.complete(prompt)


def test_redis_may_die_under_load_and_come_back(servers: list[Server], store: Store, address: str):
    one, two = servers
    prompt = tokens(1500, seed=21)
    branches = [prompt[:m] + tokens(60, seed=m) for m in (300, 511, 777, 1024, 1300)]
    store.kill()
    cold = [two.complete(branch) for branch in branches]
    redis = RedisServer(persistent=True)
    try:
        store.start(redis.url)
        until_stored(one, prompt)
        until(lambda: is_found(two), 60)
        assert two.complete(branches[0])[1] == 300
        hits = [until_exact(two, branch) for branch in branches]
        with StoreClient(address) as client:
            until(lambda: not client.stats().redis_pending_bytes, 60)

        with ThreadPoolExecutor(2) as pool:
            under_way = [pool.submit(two.complete, branch) for branch in branches * 2]
            under_way[0].result()
            redis.kill()
            assert [each.result() for each in under_way] == hits * 2
        fresh = tokens(900, seed=22)
        answer, cached = one.complete(fresh)
        assert cached == 0
        until_stored(two, fresh)

        # With the store gone, too, and then with one that starts without its Redis.
        store.kill()
        assert [two.complete(branch) for branch in branches] == cold
        store.start(redis.url)
        assert one.complete(fresh) == (answer, 0)

        redis.start()
        store.start(redis.url)
        until_stored(two, branches[2])
        assert two.complete(branches[2]) == hits[2]
        assert all(server.alive() for server in servers)
    finally:
        redis.close()
