"""Writes what a Redis server has lost, or was not there to take, as far as it is still in memory.

Nothing urgent waits for that: it goes last of all, a batch at a time, what was used last first.
What is there is not written, so that of stores with the same objects one writes each, give or take
a batch; and what is in memory no more is forgotten, so that nobody is promised it.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from tailreplay.store.batches import batches
from tailreplay.store.placement import digest_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.record import Record
    from tailreplay.store.redis_epochs import RedisEpochs
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Block

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASKED = 256
"""Objects whose servers are asked at a time whether they are there."""

_MOST_TIMES = 3
"""So often is written what there is, at most: a Redis that evicts by itself never keeps it all."""

_GIVEN_UP_S = 600.0
"""For so long nothing is written again then, whatever is lost."""

_SETTLED_S = 5.0
"""After so long what was on its way to Redis has come there."""

_BATCH_BYTES = 16 << 20
"""Most that is on its way at a time, unless one object is more."""


class Refill:
    """Looks for losses and makes up for them, on a thread of its own.

    Args:
        catalog: what was there.
        tiers: what is in memory.
        epochs: say who has lost something.
        on_lost: called when a server has lost something.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        epochs: RedisEpochs,
        on_lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._catalog = catalog
        self._tiers = tiers
        self._epochs = epochs
        self._on_lost = on_lost
        # Touched by that thread alone: servers that have lost what was not made up for yet, how
        # much was, whether anything was on its way then, and when to look again.
        self._lost: set[int] = set()
        self._written = 0
        self._unsettled = False
        self._next_s = 0.0

    def begin(self) -> None:
        """Counts as a loss what is lost from here on."""
        self._epochs.lost()

    def run(self, closing: threading.Event) -> None:
        """Does it until `closing` is set."""
        while not closing.wait(_LOOK_S):
            lost = self._epochs.lost()
            if lost:
                logger.warning(
                    "%d Redis servers may have lost what they had: memory has it", len(lost)
                )
                self._lost |= lost
                self._unsettled = self._catalog.figures()["redis_pending_bytes"] > 0
                self._on_lost()
            if self._lost and self._clock() >= self._next_s and self._make_up(closing):
                logger.info("%d objects were written to Redis again", self._written)
                self._lost.clear()
                self._written = 0
        self._epochs.close()

    def _make_up(self, closing: threading.Event) -> bool:
        """One pass over all that Redis should have; whether no other is needed.

        Another one finds out whether what this one has written is there, and what was on its way
        when Redis lost the rest. What a server has that does not answer is left for later.
        """
        missing, written, wanted, silent = 0, 0, 0, set[int]()
        for records in self._due():
            homes = self._catalog.redis.homes(records)
            some = [(r, home) for r, home in homes if self._lost & self._servers(r, home)]
            there = self._tiers.exist([r.name for r, _ in some])
            if closing.is_set():
                return False
            answers = list(zip(some, there, strict=True))
            self._tell_again([one for one, is_there in answers if is_there])
            gone = [one for one, is_there in answers if is_there is False]
            silent |= {self._payload_server(r) for (r, _), found in answers if found is None}
            wanted += len(some)
            missing += sum(record.in_cpu for record, _ in gone)
            written += self._write(gone)
        self._written += written
        if written and self._written > _MOST_TIMES * wanted:
            logger.warning("Redis keeps not all that is written to it again: wanted noeviction")
            self._next_s = self._clock() + _GIVEN_UP_S  # it evicts its epoch, too
            return True
        if written:
            return False
        if missing:
            logger.warning("Redis takes none of %d objects that it has lost", missing)
        if self._unsettled:
            self._unsettled, self._next_s = False, self._clock() + _SETTLED_S
            return False
        self._lost &= silent
        return not self._lost

    def _due(self) -> Iterator[Sequence[Record]]:
        """What Redis should have, some at a time: of memory what was used last, then the rest."""
        in_memory = self._catalog.room.latest_first(self._catalog.select(lambda r: r.in_cpu))
        yield from batches(self._within_limits(in_memory), _ASKED)
        for rest in self._catalog.sweep(lambda r: r.in_redis and not r.in_cpu):
            yield from batches(rest, _ASKED)

    def _within_limits(self, records: Sequence[Record]) -> list[Record]:
        """Those that are in Redis, or may come there by their tenants' limits."""
        quotas, found, more = self._catalog.quotas, [], Counter[bytes]()
        for record in records:
            tenant = quotas.owner(record.name.namespace)
            if not record.in_redis:
                if quotas.over(tenant, "redis", more[tenant] + record.size):
                    continue
                more[tenant] += record.size
            found.append(record)
        return found

    def _servers(self, record: Record, home: Block) -> set[int]:
        """Servers of an object, and of what is said of it."""
        return {*self._catalog.redis.servers_of(home), self._payload_server(record)}

    def _payload_server(self, record: Record) -> int:
        name = record.name
        return self._epochs.server_of(digest_of(name.namespace, name.placed_by or name.prefix_hash))

    def _tell_again(self, there: Sequence[tuple[Record, Block]]) -> None:
        """Commits what is there all the same, since another server was to say so, or we were."""
        untold = [
            (record, home)
            for record, home in there
            if not record.in_redis
            or self._lost & self._servers(record, home) - {self._payload_server(record)}
        ]
        self._catalog.redis.stored(self._catalog.redis.expect(untold))

    def _write(self, gone: Sequence[tuple[Record, Block]]) -> int:
        """Writes what is in memory, and forgets the rest; returns how many Redis has taken."""
        here = [one for one in gone if one[0].in_cpu]
        elsewhere = [one for one in gone if not one[0].in_cpu]
        if self._tiers.has_bulk:  # which may have it
            self._catalog.redis.stored(self._catalog.redis.expect(elsewhere))
        else:
            self._catalog.redis.lost([record for record, _ in elsewhere])
        # Till it is told of again, too: the server that is to say so may be another, and away.
        self._catalog.redis.lost([record for record, _ in here])
        written = 0
        for batch in _by_bytes(here):
            sizes = {record.name: record.size for record, _ in batch}
            wanted = self._catalog.redis.expect(batch)
            written += sum(self._tiers.write_again([(name, sizes[name]) for name in wanted]))
        return written


def _by_bytes(objects: Sequence[tuple[Record, Block]]) -> Iterator[list[tuple[Record, Block]]]:
    batch: list[tuple[Record, Block]] = []
    size = 0
    for one in objects:
        if batch and size + one[0].size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one[0].size
    if batch:
        yield batch
