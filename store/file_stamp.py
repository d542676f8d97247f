"""When a file was last written, so that one that changes is read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def file_stamp(file: Path) -> tuple[int, ...]:
    """Another one whenever the file is; a swapped link counts. Empty if it can not be looked at."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_dev, stat.st_size, stat.st_mtime_ns)
