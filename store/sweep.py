"""Sweeps over everything the index lists, some rows at a time, since a lock is not held for long.

Nothing here does I/O or locks: the catalog calls it under its own lock, and gives that back between
one call and the next. What is added meanwhile may or may not be among what a sweep finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tailreplay.store.record import Record
    from tailreplay.store.trees import Trees


class Sweep:
    """Records by row, whichever prefix they belong to.

    Args:
        trees: of which.
    """

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def all(self) -> Iterator[Record]:
        """Every record, under one hold of the lock."""
        return self._records(self._trees.objects.rows())

    def some(self, first: int, count: int) -> tuple[list[Record], int]:
        """Records of `count` rows from row `first` on, and the row to go on from; 0 = end."""
        kinds = self._trees.objects.kinds
        end = min(first + count, len(kinds))
        some = self._records(row for row in range(first, end) if kinds[row])
        return list(some), end if end < len(kinds) else 0

    def expired(
        self, now_s: float, first: int, count: int, *, most: int, only_redis: bool = False
    ) -> tuple[list[Record], int]:
        """Objects in Redis whose manifest has expired; as `Objects.expired`, records for rows."""
        rows, following = self._trees.objects.expired(
            now_s, first, count, most=most, only_redis=only_redis
        )
        return list(self._records(rows)), following

    def _records(self, rows: Iterable[int]) -> Iterator[Record]:
        trees, homes = self._trees, self._trees.objects.homes
        return (trees.record(row, trees.namespace(homes[row])) for row in rows)
