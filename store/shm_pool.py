"""The pool's place in /dev/shm: a name per store, one owner per name, and never more than fits."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from tailreplay.store.errors import LimitExceeded, StoreUnavailable

logger = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
MAX_SHARE = 0.75
"""Largest part of free shared memory that a pool may take."""

_PREFIX = "lmcache_l1_pool_tailreplay_"
"""LMCache puts `lmcache_l1_pool_` in front of every other name."""

_SECOND = ".kept"
"""Of the segment's second name. The first goes with a process that is killed (Python's tracker of
shared memory sees to that), and what has no name could not be opened and given back.
"""

_READ_S = 0.5
"""Most that a reader of a dead store's memory is waited for; it has lost its lane."""
_SWEEP_S = 2.0
"""Most that another store's look at a lock takes, and such a wait, however busy the machine."""
_PAUSE_S = 0.01

MIN_POOL_BYTES = 1 << 20
ALIGN_BYTES = 4096


class _Closeable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=_Closeable)


def pool_name(identity: str) -> str:
    """Return the segment name of a store.

    Args:
        identity: what tells this store from others on the machine, such as its listen address.
    """
    digest = hashlib.blake2b(identity.encode(), digest_size=10).hexdigest()
    return f"{_PREFIX}{digest}"


def affordable_bytes(wanted_bytes: int, free_bytes: int) -> int:
    """Return the largest aligned pool size within MAX_SHARE of what is free."""
    return min(wanted_bytes, int(free_bytes * MAX_SHARE)) // ALIGN_BYTES * ALIGN_BYTES


class ShmPool:
    """Ownership of one segment name, from construction to `close`.

    The lock file lies beside the segment, so that containers that share /dev/shm exclude each
    other too. The kernel drops the lock with the process: a killed store blocks nobody.

    Attributes:
        path: the segment's file.

    Raises:
        StoreUnavailable: another process, or another object in this one, owns the name; or another
            user does.
    """

    def __init__(self, identity: str) -> None:
        _sweep()
        self.path = SHM_DIR / pool_name(identity)
        self._lock_path = self.path.with_suffix(".lock")
        self._lock_fd = _lock(self._lock_path, identity)

    def build(
        self, wanted_bytes: int, construct: Callable[[int], P], least_bytes: int = MIN_POOL_BYTES
    ) -> tuple[P, int]:
        """Construct the pool at the largest size that is really there.

        A segment larger than /dev/shm can be created and mapped, and kills the process with
        SIGBUS when it is touched; so every page is reserved before anybody touches one.

        Args:
            wanted_bytes: size asked for.
            construct: makes the segment at `path` with the given size, sparse.
            least_bytes: smallest size that is of use.

        Returns:
            What `construct` made, and its size in bytes.

        Raises:
            LimitExceeded: not even `least_bytes` fit.
        """
        _remove(self.path)  # left by a killed store; we hold its lock
        size_bytes = affordable_bytes(wanted_bytes, _free_bytes())
        while size_bytes >= least_bytes:
            pool = construct(size_bytes)
            if _reserve(self.path, size_bytes):
                if size_bytes < wanted_bytes // ALIGN_BYTES * ALIGN_BYTES:
                    logger.warning(
                        "pool made smaller: %d bytes wanted, %d fit in %s",
                        wanted_bytes,
                        size_bytes,
                        SHM_DIR,
                    )
                self._link()
                return pool, size_bytes
            pool.close()
            size_bytes = affordable_bytes(size_bytes, size_bytes)
        raise LimitExceeded(
            f"pool of {wanted_bytes} bytes: {SHM_DIR} has {_free_bytes()} bytes free, "
            f"{least_bytes} must fit in {MAX_SHARE:.0%} of them"
        )

    def _link(self) -> None:
        """Gives the segment its second name; a pool is as good without one while it lives."""
        try:
            os.link(self.path, self.path.with_suffix(_SECOND))
        except OSError as error:
            logger.warning(
                "%s: after a kill the pool's memory stays with engines that have it mapped", error
            )

    def close(self) -> None:
        """Give the name up, and the memory of what `build` constructed, which is closed by now."""
        if self._lock_fd >= 0:
            _remove(self.path)
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _sweep() -> None:
    """Removes what killed stores left: segments and lock files that nobody holds any more."""
    for lock_path in SHM_DIR.glob(f"{_PREFIX}*.lock"):
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone by now, or another user's
        try:
            _clear(fd, lock_path)
        except OSError:
            continue  # a running store's
        finally:
            os.close(fd)


def _clear(fd: int, lock_path: Path) -> None:
    """Removes what a dead store left, by its lock file, which is open.

    A store that stopped meanwhile has unlinked that file, and the name may be another's by now.

    Raises:
        OSError: it is a running store's.
    """
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if os.fstat(fd).st_nlink:
        _remove(lock_path.with_suffix(""))
        lock_path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Removes a dead store's segment, and gives its memory back though engines have it mapped.

    A lane that is open tells a reader that what it copied was pinned, and the sockets of a process
    that is killed may close after its lock of the name. So readers lock the segment before they
    ask, and while one of them has it, its memory is left to them.
    """
    path.unlink(missing_ok=True)
    second = path.with_suffix(_SECOND)
    with suppress(OSError):  # gone by now, or another user's
        fd = os.open(second, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _is_own(fd) and _locked(fd, _READ_S):
                _empty(fd)
        finally:
            os.close(fd)
    with suppress(OSError):  # it may be another user's: SHM_DIR is everybody's
        second.unlink(missing_ok=True)


def _is_own(fd: int) -> bool:
    """Whether a store of this user made it, and it has no other name: SHM_DIR is everybody's."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _empty(fd: int) -> None:
    """Gives a segment's memory back. It keeps its size: who reads it finds zeros, not SIGBUS."""
    with suppress(ValueError), mmap.mmap(fd, 0) as memory:  # a ValueError where it has no size yet
        memory.madvise(mmap.MADV_REMOVE)


def _reserve(path: Path, size_bytes: int) -> bool:
    """Back every page of the segment with memory; False when there is not enough."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        return False
    finally:
        os.close(fd)
    return True


def _lock(path: Path, identity: str) -> int:
    """Return a descriptor that holds the exclusive lock of `path`."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:  # another user's, for one
            raise StoreUnavailable(f"{path} can not be locked: {error.strerror}") from error
        if not _locked(fd, _SWEEP_S):
            os.close(fd)
            raise StoreUnavailable(
                f"a store with identity {identity!r} is already running: {path} is locked"
            )
        # An owner that leaves unlinks the file, and a lock on an unlinked file excludes nobody.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _locked(fd: int, most_s: float) -> bool:
    """Takes a lock; False when its owner keeps it, and does not just look whether it has one."""
    end_s = time.monotonic() + most_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _free_bytes() -> int:
    found = os.statvfs(SHM_DIR)
    return found.f_bavail * found.f_frsize
