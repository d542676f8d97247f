"""The store's shared memory, as one data lane has it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import FileIO


class Segment:
    """A mapping that lanes share, and a file of the lane's own, to lock while it reads.

    The lock keeps the memory of a store that has just been killed from going under a reader that
    has not noticed yet: whoever gives it back must have the file alone.

    Args:
        file: the segment's, opened for this lane, owned from now on.
        memory: all of it, read-only.

    Attributes:
        memory: as given.
    """

    def __init__(self, file: FileIO, memory: mmap.mmap) -> None:
        self._file = file
        self.memory = memory

    def lock(self) -> None:
        """Before rows are asked for; never waits.

        Raises:
            OSError: the memory is just given back.
        """
        fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Once no more rows are read; does nothing to one that is not locked, or closed."""
        with contextlib.suppress(ValueError):
            # Said, since the mapping has the same open file, which closing would leave locked.
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the file up; the mapping goes with its last lane."""
        self.unlock()
        self._file.close()
