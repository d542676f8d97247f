"""Prefixes that an operator keeps in the CPU tier."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.errors import LimitExceeded
from tailreplay.store.pins import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers


@dataclass(frozen=True, slots=True)
class OperatorPin:
    """One pinned prefix.

    Attributes:
        pin_id: 16 random bytes.
        namespace: whose.
        tokens: length of the stored prefix that it was made of.
        records: what it holds.
        held_bytes: their sizes.
        left_out_bytes: what of the prefix it does not hold.
        ends_at_s: when it ends by itself, on the clock of `OperatorPins`.
    """

    pin_id: bytes
    namespace: bytes
    tokens: int
    records: tuple[Record, ...]
    held_bytes: int
    left_out_bytes: int
    ends_at_s: float


class OperatorPins:
    """Every pin. Thread-safe. They end with the store at the latest.

    Args:
        catalog: takes objects out of eviction.
        tiers: loads what is in Redis alone.
        most_bytes: of all pins together.
        timeout_s: longest wait for Redis.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        most_bytes: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        # Guarded by _lock: the pins that are not over, by id.
        self._lock = threading.Lock()
        self._pins: dict[bytes, OperatorPin] = {}

    def pin(
        self,
        namespace: bytes,
        tokens: int,
        records: Sequence[Record],
        *,
        max_bytes: int,
        seconds: float,
    ) -> OperatorPin:
        """Keeps objects of one prefix, the first ones first, as many as fit.

        Args:
            namespace: whose.
            tokens: length of the prefix.
            records: what it has, most wanted first.
            max_bytes: most bytes; 0 = what is left of `most_bytes`.
            seconds: life of the pin.

        Raises:
            LimitExceeded: nothing is left for pins.
        """
        with self._lock:
            left = self._most_bytes - sum(p.held_bytes for p in self._pins.values())
            if left <= 0:
                raise LimitExceeded(
                    f"pins hold {self._most_bytes - left} bytes, wanted less than "
                    f"{self._most_bytes} (pinned_share of the pool)"
                )
            budget = min(left, max_bytes or left)
            chosen, size = [], 0
            for record in records:
                if size + record.size <= budget:
                    chosen.append(record)
                    size += record.size
            kept = self._bring(chosen)
            held = sum(record.size for record in kept)
            pin = OperatorPin(
                secrets.token_bytes(16),
                namespace,
                tokens,
                tuple(kept),
                held,
                sum(record.size for record in records) - held,
                self._clock() + seconds,
            )
            self._pins[pin.pin_id] = pin
        return pin

    def unpin(self, pin_id: bytes) -> bool:
        """Ends a pin; False when there is none of that id."""
        with self._lock:
            pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._catalog.room.release(pin.records)
        return pin is not None

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        now = self._clock()
        for pin in self.all():
            if pin.ends_at_s <= now:
                self.unpin(pin.pin_id)

    def all(self) -> list[OperatorPin]:
        """The pins there are."""
        with self._lock:
            return list(self._pins.values())

    def seconds_left(self, pin: OperatorPin) -> float:
        """How long a pin still lives."""
        return max(0.0, pin.ends_at_s - self._clock())

    def _bring(self, records: Sequence[Record]) -> list[Record]:
        """Makes sure that objects are in the CPU tier, and keeps those that are."""
        missing = sum(record.size for record in records if not record.in_cpu)
        if missing and self._tiers.pool_bytes - self._tiers.used_bytes < missing:
            self._catalog.room.make(missing)
        held = self._tiers.pin(
            [(record.name, record.size) for record in records],
            urgent=False,
            timeout_s=self._timeout_s,
        )
        came = [r for r, one in zip(records, held, strict=True) if isinstance(one, Pinned)]
        gone = self._catalog.loaded(came)
        # What was erased while it was loaded would lie in the pool, and nobody know of it.
        self._tiers.delete([record.name for record in gone], overwrite=True, in_redis=False)
        kept = [record for record in came if record not in gone]
        self._catalog.room.keep(kept)  # before they are let go, so that none is evicted between
        self._tiers.unpin(held)
        return kept
