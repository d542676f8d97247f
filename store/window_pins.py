"""The objects of a Fetch's window: pinned while it is sent, and why others are not."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.look_ahead import Early, Stream
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers

    Reason: TypeAlias = pb.MissReason.ValueType

_MAY_COME_LATER = {
    Miss.AWAY: pb.MISS_REASON_DEADLINE,
    Miss.LATE: pb.MISS_REASON_DEADLINE,
    Miss.NO_ROOM: pb.MISS_REASON_NO_ROOM,
}
_TOO_EARLY = (Miss.LATE, Miss.NO_ROOM)


class Held(NamedTuple):
    """A window's objects.

    Attributes:
        pinned: those that are pinned.
        reasons: why others are not.
    """

    pinned: dict[ObjectName, Pinned]
    reasons: dict[ObjectName, Reason]


class WindowPins:
    """Pins windows, from Redis where need be, and notes what came of it. Thread-safe.

    Args:
        catalog: is told what has come, and what is gone.
        tiers: where objects are.
        timeout_s: longest wait for one window to come from Redis.
    """

    def __init__(self, catalog: Catalog, tiers: Tiers, timeout_s: float) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._timeout_s = timeout_s

    @contextmanager
    def of(
        self, records: Sequence[Record], urgent: bool, is_gone: Callable[[], bool]
    ) -> Iterator[Held]:
        """Holds a window's objects for the block.

        Args:
            records: the objects; those that no tier has are left out.
            urgent: whether they pass others.
            is_gone: whether the reader has left, so that nothing need be waited for.
        """
        wanted = [r for r in records if r.exists]
        came = self._pin(wanted, urgent, is_gone)
        try:
            yield self._held(wanted, came)
        finally:
            self._tiers.unpin(came)

    @contextmanager
    def of_early(
        self, early: Early, urgent: bool, stream: Stream, is_gone: Callable[[], bool]
    ) -> Iterator[Held]:
        """As `of`, of a window that is under way."""
        came = early.result()
        if came is None:
            with self.of(early.records, urgent, is_gone) as held:
                yield held
            return
        try:
            # What had no room may have some once nothing else is held.
            late = [i for i, one in enumerate(came) if one in _TOO_EARLY]
            if late:
                stream.give_up()
                again = self._pin([early.records[i] for i in late], urgent, is_gone)
                for i, one in zip(late, again, strict=True):
                    came[i] = one
            yield self._held(early.records, came)
        finally:
            self._tiers.unpin(came)

    def early(self, records: Sequence[Record], is_gone: Callable[[], bool]) -> list[Pinned | Miss]:
        """Pins the objects of a window whose turn has not come; takes no note of them."""
        return self._pin(records, records[0].name.kind is not Kind.KV, is_gone)

    def let_go(self, wanted: Sequence[Record], came: Sequence[Pinned | Miss]) -> None:
        """Ends with what was loaded ahead for a reader that has left."""
        try:
            self._noted(wanted, came)
        finally:
            self._tiers.unpin(came)

    def _held(self, wanted: Sequence[Record], came: Sequence[Pinned | Miss]) -> Held:
        reasons = self._noted(wanted, came)
        pins = (one for one in came if isinstance(one, Pinned))
        return Held({one.name: one for one in pins if one.name not in reasons}, reasons)

    def _noted(
        self, wanted: Sequence[Record], came: Sequence[Pinned | Miss]
    ) -> dict[ObjectName, Reason]:
        """Takes note of what came; says of what did not why not."""
        outcomes = list(zip(wanted, came, strict=True))
        reasons = {r.name: self._give_up(r, one) for r, one in outcomes if isinstance(one, Miss)}
        pins = {r: one for r, one in outcomes if isinstance(one, Pinned)}
        gone = self._catalog.loaded(list(pins))
        # What was erased while it was loaded would lie in the pool, and nobody know of it.
        if from_redis := [r.name for r in gone if pins[r].source == "redis"]:
            self._tiers.delete(from_redis, overwrite=True, in_redis=False)
        return reasons | dict.fromkeys((r.name for r in gone), pb.MISS_REASON_EVICTED)

    def _pin(
        self, wanted: Sequence[Record], urgent: bool, is_gone: Callable[[], bool]
    ) -> list[Pinned | Miss]:
        """Pins objects; urgent ones pass others."""
        if not urgent:
            self._tiers.gate.wait()
        loading = sum(r.size for r in wanted if not r.in_cpu)
        if loading and self._tiers.pool_bytes - self._tiers.used_bytes < loading:
            self._catalog.room.make(loading)
        return self._tiers.pin(
            [(r.name, r.size) for r in wanted],
            urgent=urgent,
            timeout_s=self._timeout_s,
            is_gone=is_gone,
        )

    def _give_up(self, record: Record, miss: Miss) -> Reason:
        """Drops a record whose payload is really gone; says why it is not there."""
        if record.in_redis and miss in _MAY_COME_LATER:
            self._catalog.late([record])
            return _MAY_COME_LATER[miss]
        self._catalog.lost(record)
        damaged = miss is Miss.DAMAGED
        return pb.MISS_REASON_INTEGRITY if damaged else pb.MISS_REASON_EVICTED
