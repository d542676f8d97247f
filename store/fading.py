"""What was used, and would expire in Redis before long: found as it is used, renewed later.

Nothing here does I/O or locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tailreplay.store.record import Record
    from tailreplay.store.trees import Trees
    from tailreplay.store.views import BlockName

_MOST = 4096
"""Blocks that wait for their renewal; of more the rest is noted with its next use."""


class Fading:
    """Blocks to be renewed, with the objects for whose sake. Not thread-safe.

    Args:
        trees: say which blocks list an object.
        clock: seconds that only grow.
        life_s: life of a manifest, seconds; 0 without Redis.
    """

    def __init__(self, trees: Trees, clock: Callable[[], float], life_s: float) -> None:
        self._trees = trees
        self._clock = clock
        self._life_s = life_s
        self._blocks: dict[BlockName, list[Record]] = {}

    def note(self, used: Iterable[Record]) -> None:
        """Notes the blocks of those objects that have less than half of their life left."""
        soon_s = self._clock() + self._life_s / 2
        for record in used:
            if not record.in_redis or record.redis_until_s >= soon_s:
                continue
            for home in self._trees.homes(record):
                block = home.called(record.name.namespace)
                if block in self._blocks or len(self._blocks) < _MOST:
                    self._blocks.setdefault(block, []).append(record)

    def take(self) -> dict[BlockName, list[Record]]:
        """Blocks to renew, each given out once."""
        taken, self._blocks = self._blocks, {}
        return taken

    def renewed(self, blocks: Iterable[BlockName], taken: Mapping[BlockName, list[Record]]) -> None:
        """Notes that blocks, with the objects that `taken` has for them, live anew."""
        for block in blocks:
            for record in taken[block]:
                record.redis_until_s = self._clock() + self._life_s
