"""What becomes of an object in the pool that readers find damaged.

A reader sees damage where rows do not fit the checksum beside them; the store, which touches no
byte on the way, does not. It is told, and looks for itself: nobody makes it drop what is whole.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, TypeVar

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.errors import IntegrityError
from tailreplay.store.frames import header_for
from tailreplay.store.header import verify_object
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.pins import Source
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers

T = TypeVar("T")

logger = logging.getLogger(__name__)

_QUIET_S = 1.0
"""For so long nothing more is believed of who has reported what was whole."""

_KNOWN_S = 10.0
"""For so long those who read what was dropped may report it as well."""

_PATIENCE_S = 1.0
"""Longest wait for those who read what is dropped, before Redis is asked for its copy."""

_NOT_LOOKED_AT = pb.ReportDamageResponse()
_DROPPED = pb.ReportDamageResponse(checked=True, damaged=True)
"""Of what was dropped now, and is to be fetched anew; what was dropped before has an equal one."""


class Damage:
    """Looks at what is said to be damaged, and drops what is. Thread-safe.

    A look costs the checksum of one object, and there is one at a time, so that reports take no
    more of the store than a fetch does. Nobody waits for a reader, or for Redis, while it lasts.

    Args:
        catalog: what exists.
        tiers: where it is.
        timeout_s: longest wait for a copy from Redis.
        clock: seconds that only grow.
    """

    def __init__(
        self, catalog: Catalog, tiers: Tiers, *, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._clock = clock
        # Held while an object is looked at; whoever holds it touches the others: until when nothing
        # is believed of a reporter, and until when a report of what was dropped is no news.
        self._looking = threading.Lock()
        self._quiet: dict[str, float] = {}
        self._dropped: dict[ObjectName, float] = {}

    def report(
        self, request: pb.ReportDamageRequest, public: bytes | None, reporter: str
    ) -> pb.ReportDamageResponse:
        """Looks at an object that came damaged, and drops it if it is so.

        Args:
            request: which; the namespace is that of the store.
            public: namespace of the public scope, where the reporter reads as well.
            reporter: whom to believe nothing for a while if it is whole.
        """
        if not self._looking.acquire(blocking=False):
            return pb.ReportDamageResponse()
        try:
            self._quiet, self._dropped = self._in_force(self._quiet), self._in_force(self._dropped)
            record = None if reporter in self._quiet else self._record(request, public)
            found = self._look(record, reporter) if record is not None else _NOT_LOOKED_AT
        finally:
            self._looking.release()
        if record is not None and found is _DROPPED:
            self._fetch_anew(record)  # others may report meanwhile
        return found

    def drop(self, record: Record, source: Source) -> None:
        """Drops an object that was found damaged.

        Args:
            record: which.
            source: where the bytes were found: those that came from Redis go there as well.
        """
        self._catalog.count("integrity_errors")
        kept = source == "cpu" and record.in_redis
        logger.warning(
            "dropped a damaged %s object of %d bytes from memory%s",
            record.name.kind.name.lower(),
            record.size,
            ", not from Redis" if kept else " and from Redis" if record.in_redis else "",
        )
        if kept:
            self._tiers.drop([record.name])
            self._catalog.late([record])
        else:
            self._catalog.lost(record)
            self._tiers.delete([record.name])

    def _look(self, record: Record, reporter: str) -> pb.ReportDamageResponse:
        damaged = self._drop_if_damaged(record, "cpu") if record.in_cpu else None
        if not damaged and record.name in self._dropped:
            return pb.ReportDamageResponse(checked=True, damaged=True)
        if damaged is None:
            return _NOT_LOOKED_AT
        self._catalog.count("damage_reports")
        if damaged:
            self._dropped[record.name] = self._clock() + _KNOWN_S
            return _DROPPED
        self._catalog.count("unfounded_damage_reports")
        self._quiet[reporter] = self._clock() + _QUIET_S
        return pb.ReportDamageResponse(checked=True)

    def _in_force(self, until: dict[T, float]) -> dict[T, float]:
        now_s = self._clock()
        return {what: until_s for what, until_s in until.items() if until_s > now_s}

    def _record(self, request: pb.ReportDamageRequest, public: bytes | None) -> Record | None:
        """The object, if it is one that the reporter may read."""
        space, leaf, name = request.namespace, request.leaf, request.prefix_hash
        if request.kind == pb.KIND_CHECKPOINT:
            record = self._catalog.record(ObjectName(space, Kind.CHECKPOINT, name))
            if record is None and public is not None:
                record = self._catalog.public_state(public, name)
            return record
        if request.kind not in (pb.KIND_KV, pb.KIND_HIDDEN):
            return None
        hidden = request.kind == pb.KIND_HIDDEN
        if public is None:
            path = self._catalog.path(space, leaf, hidden=hidden)
        else:
            path = self._catalog.path_with_public(space, public, leaf, hidden=hidden)
        along = path.hidden if hidden else path.kv
        return next((record for record in along if record.name.prefix_hash == name), None)

    def _drop_if_damaged(self, record: Record, source: Source) -> bool | None:
        """Whether the copy in memory was damaged, and is dropped; None if there is none by now.

        Dropped while it is pinned, or a whole copy could have come in its place.
        """
        timeout_s = self._timeout_s if source == "redis" else 0.0
        wanted = [(record.name, record.size)]
        (held,) = self._tiers.pin(wanted, urgent=True, timeout_s=timeout_s)
        if not isinstance(held, Pinned):
            return None
        try:
            if source == "redis" and self._catalog.loaded([record]):
                # Erased meanwhile: it would lie in the pool, and nobody know of it.
                self._tiers.delete([record.name], overwrite=True, in_redis=False)
                return None
            header_for(held.data, record)
            verify_object(held.data, record.name)
        except IntegrityError as error:
            logger.debug("damage in the pool: %s", error)
            self.drop(record, source)
            return True
        finally:
            self._tiers.unpin(held)
        return False

    def _fetch_anew(self, record: Record) -> None:
        """Brings what Redis has in place of what was dropped, unless that is damaged, too."""
        # Else somebody reads it for long, and the next reader finds out.
        if record.in_redis and self._tiers.wait_until_gone([record.name], _PATIENCE_S):
            self._drop_if_damaged(record, "redis")
