"""Who else on this machine may use a store: a group, or nobody."""

from __future__ import annotations

import os

from tailreplay.store.errors import StoreUnavailable

_OWNERS = 0o600
_READERS = 0o044


def file_mode(text: str) -> int:
    """Return the mode of a file that its owner writes, and others read at most.

    Raises:
        ValueError: it is none.
    """
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if mode & ~_READERS != _OWNERS:
        raise ValueError(
            "wanted an octal mode that lets none but its owner write: 0600, 0640, 0604 or 0644"
        )
    return mode


def let_group_in(path: str | os.PathLike[str], gid: int | None, mode: int) -> None:
    """Gives a file to a group with a mode; does nothing without a group.

    Raises:
        StoreUnavailable: this user may not.
    """
    if gid is None:
        return
    try:
        os.chown(path, -1, gid)
        os.chmod(path, mode)
    except OSError as error:
        raise StoreUnavailable(
            f"can not give {path} to group {gid} (access_gid): {error.strerror}"
        ) from error
