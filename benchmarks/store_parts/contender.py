"""What every contender of a transfer benchmark does, and how its rounds are measured."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from store_parts.children import Answer, answer_commands, cpu_s

Blob = npt.NDArray[np.uint8]
"""Objects, `[objects, object bytes]`."""


class Contender(Protocol):
    """One way to move objects between this process and a server.

    Attributes:
        servers: processes whose CPU counts beside this one's.
    """

    servers: list[int]

    def put(self, number: int) -> None:
        """Stores all objects under names of their own; returns when the server has acknowledged."""

    def get(self) -> None:
        """Brings the objects of the last put into this process's memory."""

    def got(self) -> Blob:
        """What the last `get` brought; not measured."""

    def close(self) -> None:
        """Ends the servers."""


def objects(count: int, object_bytes: int) -> Blob:
    """The same random objects in every process, in memory that has been touched."""
    data = np.random.default_rng(7).bytes(count * object_bytes)
    return np.frombuffer(bytearray(data), np.uint8).reshape(count, object_bytes)


def touched(count: int, object_bytes: int) -> Blob:
    """Room for objects whose pages are there already."""
    return np.full((count, object_bytes), 1, np.uint8)


def addresses(blob: Blob) -> list[int]:
    """Where each object of a blob lies."""
    base, step = blob.ctypes.data, blob.strides[0]
    return [base + i * step for i in range(len(blob))]


def serve_contender(contender: Contender, wanted: Blob) -> None:
    """Answers `put`, `get` and `check` until the parent is done.

    Args:
        contender: what is measured; closed at the end.
        wanted: the objects that it must bring back.
    """

    def put(number: int) -> Answer:
        return _measured(contender, lambda: contender.put(number), wanted.nbytes)

    def get() -> Answer:
        return _measured(contender, contender.get, wanted.nbytes)

    def check() -> Answer:
        contender.get()
        return {"same": bool(np.array_equal(contender.got().reshape(-1), wanted.reshape(-1)))}

    try:
        facts = {"pid": os.getpid(), "servers": contender.servers}
        answer_commands(facts, {"put": put, "get": get, "check": check})
    finally:
        contender.close()


def _measured(contender: Contender, call: Callable[[], object], size: int) -> Answer:
    own, theirs = time.process_time(), cpu_s(*contender.servers)
    started_s = time.perf_counter()
    call()
    wall_s = time.perf_counter() - started_s
    mib = size / (1 << 20)
    client_ms = (time.process_time() - own) * 1000 / mib
    server_ms = (cpu_s(*contender.servers) - theirs) * 1000 / mib
    return {
        "cpu_ms_per_mib": client_ms + server_ms,
        "client_cpu_ms_per_mib": client_ms,
        "server_cpu_ms_per_mib": server_ms,
        "gib_per_s": mib / 1024 / wall_s,
    }
