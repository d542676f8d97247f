"""Memory that a writer of this machine fills and the store reads, so that nothing is sent."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from tailreplay.store.errors import InvalidRequest

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Staging:
    """One segment, made and sealed here: whatever its writer does, reading it raises no SIGBUS.

    What is read is copied first and checked afterwards, so that a writer that changes it meanwhile
    changes nothing that was checked.

    Args:
        size_bytes: its size.

    Attributes:
        size_bytes: its size.

    Raises:
        OSError: there is no memory for it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = os.memfd_create("tailreplay-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def fd(self) -> int:
        """For the writer; good until `close`."""
        return self._fd

    def copy_out(self, offset: int, target: memoryview) -> None:
        """Fills `target` with what lies at `offset`.

        Raises:
            InvalidRequest: that is outside the segment.
        """
        if offset + len(target) > self.size_bytes:
            raise InvalidRequest(
                f"object of {len(target)} bytes at {offset} of a staging segment with "
                f"{self.size_bytes} bytes, wanted one inside it"
            )
        source = np.frombuffer(self._memory, np.uint8, len(target), offset)
        np.copyto(np.frombuffer(target, np.uint8), source)

    def close(self) -> None:
        """Gives it up; its memory goes with the writer's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._memory.close()
