"""A store in a process of its own, and whether it is well again after something happened to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from lane_objects import WAIT_S, fetch, put, rows_of
from store_objects import Prefix, span_range
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.connector.demo_processes import Process, start_store
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import Kind
from tailreplay.store.shm_pool import SHM_DIR, pool_name

PREFIX = Prefix(bytes(range(32)), range(1, 701))
RANGE = span_range(Kind.KV, 0, 613)
POOL_BYTES = 64 << 20
BACK_S = 5.0
"""Longest time until hits are back, on a machine that does nothing else."""


class LivingStore:
    """A store process at one address, over kills and restarts, and a client that stays.

    Args:
        folder: for its socket and its log.
        redis_url: its Redis; None for none.
    """

    def __init__(self, folder: Path, redis_url: str | None) -> None:
        self.address = f"unix://{folder}/store.sock"
        self._folder, self._redis_url = folder, redis_url
        self.process: Process
        self._open_segments: list[BinaryIO] = []
        self.start()
        self.client = StoreClient(self.address, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S)

    def start(self) -> None:
        self.process = start_store(self.address, self._redis_url, POOL_BYTES, self._folder)
        # An open file keeps its memory, as the mapping of an idle engine does.
        self._open_segments.append((SHM_DIR / pool_name(self.address)).open("rb", buffering=0))

    @property
    def segments(self) -> list[str]:
        """Its files in shared memory."""
        stem = pool_name(self.address)
        return sorted(p.suffix for p in SHM_DIR.glob(f"{stem}*"))

    @property
    def held_bytes(self) -> list[int]:
        """Memory of its segments, of all its lives, oldest first."""
        return [os.fstat(file.fileno()).st_blocks * 512 for file in self._open_segments]

    def halted(self, what: str, prefix: Prefix = PREFIX) -> subprocess.Popen[str]:
        """A reader ("fetch") or writer ("put") that has halted half way; a line lets it go on."""
        script = Path(__file__).with_name("lane_reader_child.py")
        environment = {**os.environ, "PYTHONPATH": str(script.parent)}
        child = subprocess.Popen(
            [sys.executable, "-P", str(script), self.address, prefix.namespace.hex(), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        return child

    def hits(self, prefix: Prefix = PREFIX) -> bool:
        """Whether what was put comes back whole."""
        try:
            return fetch(self.client, prefix, RANGE)[0] == [rows_of(prefix, RANGE)]
        except TailReplayError:
            return False

    def assert_well(self, prefix: Prefix = PREFIX) -> None:
        """Hits are back in time, and nothing is held that nobody uses."""
        since_s = time.monotonic()
        until(lambda: self.hits(prefix), BACK_S)
        until(lambda: not self.client.stats().pinned_bytes, BACK_S)
        until(lambda: not self.client.stats().leases, BACK_S)
        assert time.monotonic() - since_s < 2 * BACK_S
        assert self.segments == ["", ".kept", ".lock"]
        assert self.held_bytes == [*[0] * (len(self._open_segments) - 1), POOL_BYTES]
        used = self.client.stats().pool_used_bytes
        fresh = Prefix(os.urandom(32), PREFIX.ids)
        assert put(self.client, fresh).stored == len(fresh.spans())
        until(lambda: self.client.stats().pool_used_bytes > used)

    def close(self) -> None:
        # Not killed before it is done: what it leaves behind is looked at.
        self.process.child.terminate()
        self.process.child.wait(3 * WAIT_S)
        assert (self.segments, sum(self.held_bytes)) == ([], 0)
        self.client.close()
        for file in self._open_segments:
            file.close()
