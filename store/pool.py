"""The CPU tier's memory: shared with this machine's engines, or private."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Literal, TypeAlias

from lmcache.v1.distributed.l1_manager import L1Manager

from tailreplay.store.access import let_group_in
from tailreplay.store.errors import LimitExceeded
from tailreplay.store.lmcache_l1 import construct_l1, touch
from tailreplay.store.shm_pool import ALIGN_BYTES, MIN_POOL_BYTES, ShmPool

logger = logging.getLogger(__name__)

SharedMemory: TypeAlias = Literal["auto", "require", "off"]

_LEAST_SHARE = 4
"""A shared pool below a quarter of what was asked for would only miss; a private one is better."""


class Pool:
    """Memory of the CPU tier, reserved and touched: using it raises no SIGBUS later.

    Args:
        identity: what tells this store from others on the machine.
        wanted_bytes: its size; shared memory may make it smaller.
        shared_memory: "auto" takes private memory where /dev/shm has too little, "require" takes
            what there is, "off" takes private memory.
        access_gid: group that may read it; None = this user alone.
        mode: of its file; None = 0600, or 0640 for a group.

    Attributes:
        l1: LMCache's manager of it; whoever takes it closes it.
        size_bytes: its size.
        shm_path: file of the shared segment; empty when it is private.

    Raises:
        StoreUnavailable: a store with this identity is running.
        LimitExceeded: shared memory is required, and there is none; or there is no memory at all.
    """

    def __init__(
        self,
        identity: str,
        wanted_bytes: int,
        shared_memory: SharedMemory,
        access_gid: int | None,
        mode: int | None = None,
    ) -> None:
        with contextlib.ExitStack() as undo:
            self._shm = ShmPool(identity)
            undo.callback(self._shm.close)
            self.l1, self.size_bytes, self.shm_path = self._build(wanted_bytes, shared_memory)
            undo.callback(self.l1.close)
            if self.shm_path:
                let_group_in(self.shm_path, access_gid, 0o640 if mode is None else mode)
                if mode is not None:
                    os.chmod(self.shm_path, mode)
            touch(self.l1)
            undo.pop_all()

    def close(self) -> None:
        """Gives the name up; the memory goes with `l1`."""
        self._shm.close()

    def _build(self, wanted_bytes: int, shared_memory: SharedMemory) -> tuple[L1Manager, int, str]:
        if shared_memory != "off":
            required = shared_memory == "require"
            least_bytes = MIN_POOL_BYTES if required else wanted_bytes // _LEAST_SHARE
            name = self._shm.path.name
            try:
                l1, size = self._shm.build(
                    wanted_bytes, lambda size: construct_l1(size, name), least_bytes
                )
                return l1, size, str(self._shm.path)
            except LimitExceeded as error:
                if required:
                    raise
                logger.warning("%s: private memory instead, engines get copies", error)
        size = wanted_bytes // ALIGN_BYTES * ALIGN_BYTES
        try:
            return construct_l1(size, ""), size, ""
        except RuntimeError as error:
            raise LimitExceeded(
                f"pool_bytes is {wanted_bytes}, wanted at most what this machine has free"
            ) from error
