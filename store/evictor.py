"""The one evictor: which objects leave the CPU tier when room is needed.

Least recently used first; within one use, late blocks of a prefix before early ones, so that what
is left of a prefix is always a prefix. It only decides; the store asks the tier to act.

Nothing here locks: the store calls it under its own lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tailreplay.store.record import Record


class Evictor:
    """Order of use of every object in the CPU tier.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Oldest first, with the time of its last use. Every record in the CPU tier is here, and
        # those that may come there late.
        self._order: OrderedDict[Record, float] = OrderedDict()

    def use(self, records: Iterable[Record]) -> None:
        """Marks objects of one prefix as used now.

        Args:
            records: those of them that are in the CPU tier, in any order.
        """
        now_s = self._clock()
        for record in sorted(records, key=lambda r: r.end_token, reverse=True):
            self._order[record] = now_s
            self._order.move_to_end(record)

    def demote(self, record: Record) -> None:
        """Makes an object the next to go."""
        if record in self._order:
            self._order.move_to_end(record, last=False)

    def forget(self, record: Record) -> None:
        """Takes an object out, because it has left the CPU tier."""
        self._order.pop(record, None)

    def victims(
        self, wanted_bytes: int, *, spare: Callable[[Record], bool] = lambda _: False
    ) -> list[Record]:
        """Objects to evict, oldest first, until they make `wanted_bytes` or none is left.

        Args:
            wanted_bytes: how much room is needed.
            spare: says which objects must stay.
        """
        chosen, freed = [], 0
        for record in self._order:
            if freed >= wanted_bytes:
                break
            if not spare(record):
                chosen.append(record)
                freed += record.size
        return chosen

    def idle_s(self, record: Record) -> float:
        """Seconds since an object's last use; 0 when it is not here."""
        used_s = self._order.get(record)
        return self._clock() - used_s if used_s is not None else 0.0

    def order(self) -> list[Record]:
        """Every object, the next to go first."""
        return list(self._order)

    def __len__(self) -> int:
        return len(self._order)
