"""One prefix being stored: its objects claimed, given room, checked, and listed last."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.announced import KINDS, check_announced
from tailreplay.store.arrivals import Arrived
from tailreplay.store.errors import InvalidRequest, TailReplayError
from tailreplay.store.header import rename, verify_object
from tailreplay.store.reserved import NoRoom

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.header import Header
    from tailreplay.store.objects import ObjectName
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.put_source import PutSource
    from tailreplay.store.reserved import Reserved
    from tailreplay.store.sightings import Sightings
    from tailreplay.store.tiers import Tiers

_BATCH_BYTES = 8 << 20
_BATCH_SHARE = 64
"""Objects of a Put are stored together up to so many bytes, and this part of the pool."""


class PutSession:
    """One prefix being stored. What it has claimed and not stored is given back at its end.

    Args:
        catalog: lists what has arrived.
        tiers: keeps it.
        prompt: the prefix, in the namespace to keep it in.
        max_object_bytes: largest object taken.
        sightings: what has been offered before, if only that is to be taken.

    Attributes:
        response: what has become of the objects so far.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        prompt: Prompt,
        max_object_bytes: int,
        sightings: Sightings | None,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._prompt = prompt
        self._max_object_bytes = max_object_bytes
        self._sightings = sightings
        self._batch_bytes = min(_BATCH_BYTES, tiers.pool_bytes // _BATCH_SHARE)
        # State: names that are this Put's, how long it has waited for room, and what came of it.
        self._claimed: set[ObjectName] = set()
        self._waited_s = 0.0
        self.response = pb.PutResponse()

    def __enter__(self) -> PutSession:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._claimed:
            self._catalog.unclaim(name)
        self._catalog.used_prefix(self._prompt)

    def claim(self, wanted: pb.PutObject) -> bool:
        """Whether the caller should send an object.

        False when it is there, on its way, or offered for the first time where that is too early.

        Raises:
            InvalidRequest, LimitExceeded: it can not be stored.
        """
        check_announced(wanted, len(self._prompt), self._max_object_bytes)
        name = self._name(wanted)
        if not self._catalog.claim(self._prompt, name, wanted.end_token, wanted.size_bytes):
            self.response.duplicates += 1
            return False
        if self._sightings is not None and not self._sightings.again(name):
            self._catalog.unclaim(name)
            self._catalog.count("not_admitted_objects")
            self.response.not_admitted += 1
            return False
        self._claimed.add(name)
        return True

    def store(self, wanted: Sequence[pb.PutObject], source: PutSource) -> None:
        """Stores claimed objects, some at a time; what there is no room for is passed over.

        What is there already may be approximate; then it gives way to what comes. Those whose
        bytes have come whole before an error stay stored.

        Args:
            wanted: what was claimed.
            source: has their bytes, in order; all are taken, even if one is not as it should be,
                so that the writer hears why.

        Raises:
            IntegrityError, InvalidRequest, GeometryMismatch: its bytes are not what they should be.
        """
        queue = deque(wanted)
        try:
            while queue:
                self._store_some(queue, source)
        except TailReplayError:
            for rest in queue:
                source.skip(rest.size_bytes)
            raise

    def _store_some(self, queue: deque[pb.PutObject], source: PutSource) -> None:
        """Stores the first of the queue together, and takes each from it once its bytes came."""
        batch = self._reserved(queue)
        try:
            for due in batch:
                wanted = queue.popleft()
                if due.place is None:
                    source.skip(wanted.size_bytes)
                else:
                    source.take(due.place.data)
                    due.header = self._verified(due, due.place.data)
        finally:
            self._settle(batch)

    def _reserved(self, queue: Iterable[pb.PutObject]) -> list[_Due]:
        """The first objects of the queue, with room for each that there is room for."""
        most = 0 if self._catalog.room.is_limited(self._prompt.namespace) else self._batch_bytes
        batch: list[_Due] = []
        by_size: dict[int, list[_Due]] = {}
        for wanted in queue:
            most -= wanted.size_bytes
            if batch and most < 0:
                break
            batch.append(due := _Due(wanted, self._name(wanted)))
            by_size.setdefault(wanted.size_bytes, []).append(due)
        try:
            first_bytes = batch[0].wanted.size_bytes
            if self._catalog.room.allow(self._prompt.namespace, first_bytes, self._make_room):
                for size, dues in by_size.items():
                    self._reserve(dues, size)
        except BaseException:
            self._settle(batch)
            raise
        return batch

    def _reserve(self, dues: Sequence[_Due], size: int) -> None:
        self._ask(dues, size)
        if len(dues) > 1 and (full := [due for due in dues if due.outcome is NoRoom.FULL]):
            self._catalog.room.make(size * len(full))
            self._ask(full, size)
            for due in full:  # each by itself, since many get room together or not at all
                if due.outcome is NoRoom.FULL:
                    self._ask([due], size)
        for due in dues:
            if due.outcome is NoRoom.EXISTS and self._tiers.evict([due.name]):
                # It was approximate, or a load from Redis that nobody waited for left it unlisted.
                self._ask([due], size)
            while due.outcome is NoRoom.FULL and self._make_room(size):
                self._ask([due], size)

    def _make_room(self, size: int, tenant: bytes | None = None) -> bool:
        """As `Backlog.make_room`, as long as this Put has not waited for too long already."""
        began_s = time.monotonic()
        try:
            return self._catalog.backlog.make_room(size, tenant, waited_s=self._waited_s)
        finally:
            self._waited_s += time.monotonic() - began_s

    def _ask(self, dues: Sequence[_Due], size: int) -> None:
        places = self._tiers.reserve([due.name for due in dues], size)
        for due, place in zip(dues, places, strict=True):
            due.take(place)

    def _settle(self, batch: Sequence[_Due]) -> None:
        """Makes objects visible that are as they should be, and lists them; forgets the others."""
        good = [(due, due.place, due.header) for due in batch if due.place and due.header]
        bad = [due for due in batch if not (due.place and due.header)]
        if unused := [due.place for due in bad if due.place is not None]:
            self._tiers.abandon(unused)
        for due in bad:
            self._claimed.discard(due.name)
            self._catalog.unclaim(due.name)
            self.response.duplicates += due.outcome is NoRoom.EXISTS
            self._drop(int(due.outcome is NoRoom.FULL))
        if not good:
            return
        self._tiers.commit([place for _, place, _ in good])
        self._claimed.difference_update(due.name for due, *_ in good)
        arrived = [
            Arrived(
                due.name,
                due.wanted.end_token,
                place.size,
                header.provenance,
                due.wanted.tail_figures,
            )
            for due, place, header in good
        ]
        for one, listed in zip(arrived, self._catalog.admit(self._prompt, arrived), strict=True):
            if listed:
                self.response.stored += 1
                self.response.stored_bytes += one.size
            else:
                self._tiers.delete([one.name])
                self._drop(1)

    def _drop(self, objects: int) -> None:
        if objects:
            self.response.dropped += objects
            self._catalog.count("dropped_objects", objects)

    def _name(self, wanted: pb.PutObject) -> ObjectName:
        return self._prompt.name(KINDS[wanted.kind], wanted.end_token)

    def _verified(self, due: _Due, data: memoryview) -> Header:
        """The header of an object that is in every way what was announced."""
        name, sent, wanted = due.name, self._prompt.sent_namespace, due.wanted
        if name.namespace == sent:
            header = verify_object(data, name)
        else:
            header = verify_object(data, replace(name, namespace=sent))
            rename(data, header, name.namespace)
        if (header.first_token, header.end_token) != (wanted.first_token, wanted.end_token):
            raise InvalidRequest(
                f"object holds rows [{header.first_token}, {header.end_token}), "
                f"announced [{wanted.first_token}, {wanted.end_token})"
            )
        self._catalog.check_geometry(name.namespace, header.geometry)
        return header


class _Due:
    """A claimed object whose bytes are to come: its room, and its header once it has been checked.

    Without room `outcome` says why; FULL, too, for what was not asked for.
    """

    __slots__ = ("header", "name", "outcome", "place", "wanted")

    def __init__(self, wanted: pb.PutObject, name: ObjectName) -> None:
        self.wanted, self.name = wanted, name
        self.place: Reserved | None = None
        self.header: Header | None = None
        self.outcome: NoRoom | None = NoRoom.FULL

    def take(self, place: Reserved | NoRoom) -> None:
        """Takes note of the room it got, or did not get."""
        if isinstance(place, NoRoom):
            self.outcome = place
        else:
            self.place, self.outcome = place, None
