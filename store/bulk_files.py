"""Files of a bulk tier that keeps each object in one, under a name that begins with its namespace.

LMCache's `fs` adapter names them `<namespace>|<kind>@<rank>@<kind>@<prefix hash>.data`, hashes in
hex, and `.tmp` while they are written. Nothing there expires, so there may be what no index knows.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

logger = logging.getLogger(__name__)


class BulkFiles:
    """Finds and deletes files by what they are of. Thread-safe.

    Args:
        folders: in which they lie.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def delete(
        self, namespaces: Collection[bytes], names: Collection[bytes] | None
    ) -> tuple[int, int]:
        """Deletes what there is of namespaces, or of some prefixes in them.

        Args:
            namespaces: whose.
            names: prefix hashes; None = all.

        Returns:
            How many files it has deleted, and how many there are then.

        Raises:
            OSError: a folder can not be listed.
        """
        spaces = {space.hex() for space in namespaces}
        ends = None if names is None else {name.hex() for name in names}
        found = list(self._of(spaces, ends))
        for path in found:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("a file of a bulk tier can not be deleted: %s", error)
        left = set(self._of(spaces, ends))
        return len(set(found) - left), len(left)

    def _of(self, spaces: Collection[str], ends: Collection[str] | None) -> Iterator[Path]:
        for folder in self._folders:
            if not folder.exists():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    space, _, rest = entry.name.partition("|")
                    name = rest.rpartition("@")[2].partition(".")[0]
                    if space in spaces and (ends is None or name in ends):
                        yield Path(entry.path)
