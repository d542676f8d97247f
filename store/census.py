"""Asks Redis, a little at a time, whether it still has what is listed there.

Manifests say what is listed, and they outlive a payload that somebody deletes behind the store's
back, or that a Redis drops which evicts by itself. Without this, what is used in Redis would be
counted too high until a load comes across it or the manifest expires.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tailreplay.store.batches import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 60.0
"""Each time a piece of the index is gone through, so that 240,000 objects take an hour."""

_ASKED = 256
"""Objects asked for at a time."""


class Census:
    """Goes round what is listed in Redis, and forgets what is not there. For one thread.

    It does nothing where bulk tiers may have what Redis has not.

    Args:
        catalog: lists it.
        tiers: ask Redis.
        clock: seconds that only grow.
    """

    def __init__(self, catalog: Catalog, tiers: Tiers, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._clock = clock
        # When to ask next, and what of the round under way is still to be asked for.
        self._next_s = clock() + _LOOK_EVERY_S
        self._round: Iterator[list[Record]] = iter(())

    def tick(self) -> None:
        """Asks for the next objects if it is time."""
        if self._tiers.has_bulk or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _LOOK_EVERY_S
        listed = next(self._round, None)
        if listed is None:
            self._round = self._catalog.sweep(lambda record: record.in_redis)
            listed = next(self._round)
        gone = [record for some in batches(listed, _ASKED) for record in self._gone(some)]
        self._catalog.redis.lost(gone)  # manifests stay, as others may be writing it anew
        if gone:
            logger.info("%d objects are not in Redis any more", len(gone))

    def _gone(self, records: Sequence[Record]) -> list[Record]:
        there = self._tiers.exist([record.name for record in records])
        return [one for one, found in zip(records, there, strict=True) if found is False]
