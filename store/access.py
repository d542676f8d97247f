"""Who else on this machine may use a store: a group, or nobody."""

from __future__ import annotations

import os

from tailreplay.store.errors import StoreUnavailable


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
