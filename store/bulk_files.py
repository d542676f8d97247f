"""Files of a bulk tier that keeps each object in one, under a name that begins with its namespace.

LMCache's `fs` adapter names them `<namespace>|<kind>@<rank>@<kind>@<prefix hash>.data`, hashes in
hex, and `.tmp` while they are written. Nothing there expires, so there may be what no index knows,
nor Redis: an empty file `<namespace>|owner@<tenant>.owner` beside them says whose a namespace is.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_OWNER = ".owner"


class BulkFiles:
    """Finds and deletes files by what they are of. Thread-safe.

    Args:
        folders: in which they lie; owners in the first.

    All methods raise OSError when a folder can not be listed, or not be written to.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Notes tenants by namespace, for as long as there are files."""
        for space, tenant in owners.items():
            (self._folders[0] / f"{space.hex()}|owner@{tenant.hex()}{_OWNER}").touch()

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """Namespaces that were noted as a tenant's."""
        mark = f"|owner@{tenant.hex()}{_OWNER}"
        found = [path.name for path in self._files() if path.name.endswith(mark)]
        return {bytes.fromhex(name.removesuffix(mark)) for name in found}

    def delete(
        self, namespaces: Collection[bytes], names: Collection[bytes] | None
    ) -> tuple[int, int]:
        """Deletes what there is of namespaces, or of some prefixes in them.

        Args:
            namespaces: whose.
            names: prefix hashes; None = all.

        Returns:
            How many objects' files it has deleted, and how many there are then. Whose they are is
            forgotten once there are none.
        """
        spaces = {space.hex() for space in namespaces}
        ends = None if names is None else {name.hex() for name in names}
        owners = [path for path in self._of(spaces, None) if path.suffix == _OWNER]
        found = self._objects(spaces, ends)
        _delete(found)
        left = self._objects(spaces, ends)
        if ends is None and not left:
            _delete(owners)
        return len(found - left), len(left)

    def _objects(self, spaces: Collection[str], ends: Collection[str] | None) -> set[Path]:
        return {path for path in self._of(spaces, ends) if path.suffix != _OWNER}

    def _of(self, spaces: Collection[str], ends: Collection[str] | None) -> Iterator[Path]:
        for path in self._files():
            space, _, rest = path.name.partition("|")
            name = rest.rpartition("@")[2].partition(".")[0]
            if space in spaces and (ends is None or name in ends):
                yield path

    def _files(self) -> Iterator[Path]:
        for folder in self._folders:
            if folder.exists():
                with os.scandir(folder) as entries:
                    yield from (Path(entry.path) for entry in entries)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a file of a bulk tier can not be deleted: %s", error)
