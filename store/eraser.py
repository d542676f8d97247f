"""Forgets what operators want forgotten, in both tiers, and proves it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.tier_bytes import count_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.ledger import Ledger
    from tailreplay.store.objects import Kind, ObjectName
    from tailreplay.store.quota import TierName
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers

logger = logging.getLogger(__name__)

_BATCH = 256
_PAUSE_S = 0.02
_ROUNDS = 3
"""A write that was on its way may land behind a first deletion in Redis."""


@dataclass(slots=True)
class Erased:
    """What an erasure did, and what a count afterwards found.

    Attributes:
        removed: objects and bytes by tier and kind.
        overwritten_bytes: bytes of the pool that hold nothing of it any more.
        held: objects that readers hold, and that go when they let go.
        redis_keys: keys deleted in Redis, manifests among them.
        left_in_cpu: objects that the index or the pool still has.
        left_in_redis: keys in Redis.
    """

    removed: Counter[tuple[TierName, Kind, str]] = field(default_factory=Counter)
    overwritten_bytes: int = 0
    held: int = 0
    redis_keys: int = 0
    left_in_cpu: int = 0
    left_in_redis: int = 0


class Eraser:
    """Takes namespaces out of a store.

    Args:
        catalog: what exists.
        tiers: where it is.
        ledger: Redis, for what the index does not know; None without Redis.
        patience_s: how long to wait for those who read or write what is deleted.
    """

    def __init__(
        self, catalog: Catalog, tiers: Tiers, ledger: Ledger | None, patience_s: float = 3.0
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._ledger = ledger
        self._patience_s = patience_s

    def clear(self, namespaces: Collection[bytes] | None) -> Erased:
        """Forgets all objects of some namespaces, or of all.

        Raises:
            StoreUnavailable: Redis does not answer; the CPU tier has been cleared.
        """
        done = Erased()
        every = self._catalog.select
        records = every(lambda _: True) if namespaces is None else self._all_of(namespaces)
        self._drop(records, done, overwrite=False)
        spaces = self._catalog.namespaces() if namespaces is None else namespaces
        self._delete_in_redis(spaces, done)
        return done

    def erase(self, namespaces: Collection[bytes]) -> Erased:
        """As `clear`, and overwrites the bytes in the pool, and counts what is left.

        Raises:
            StoreUnavailable: Redis does not answer, so that there is no proof; the CPU tier has
                been cleared.
        """
        done = Erased()
        self._drop(self._all_of(namespaces), done, overwrite=True)
        self._delete_in_redis(namespaces, done)
        done.left_in_cpu = len(self._all_of(namespaces))
        return done

    def erase_prefix(
        self, namespace: bytes, blocks: Sequence[bytes], spared: Callable[[bytes], bool]
    ) -> Erased:
        """As `erase`, of the last blocks of a prefix and all that goes on from them.

        Args:
            namespace: whose.
            blocks: their names, in order; none = nothing goes.
            spared: whether an object of that name stays.

        Raises:
            StoreUnavailable: as `erase`.
        """
        done = Erased()
        if blocks:
            self._list_all_of(namespace)
            records = self._behind(namespace, blocks[0], spared)
            names = {*blocks, *(record.name.prefix_hash for record in records)}
            self._drop(records, done, overwrite=True)
            self._delete_in_redis([namespace], done, names)
            done.left_in_cpu = len(self._behind(namespace, blocks[0], spared))
        return done

    def _list_all_of(self, namespace: bytes) -> None:
        """Lists what other stores have put into Redis as well."""
        try:
            self._catalog.restore(namespace)
        except StoreUnavailable as error:
            logger.debug("not all of a namespace is listed: %s", error)

    def _all_of(self, namespaces: Collection[bytes]) -> list[Record]:
        return self._catalog.select(lambda r: r.name.namespace in namespaces)

    def _behind(
        self, namespace: bytes, block: bytes, spared: Callable[[bytes], bool]
    ) -> list[Record]:
        records = self._catalog.behind(namespace, block)
        return [record for record in records if not spared(record.name.prefix_hash)]

    def _drop(self, records: Sequence[Record], done: Erased, *, overwrite: bool) -> None:
        held: list[ObjectName] = []
        for batch in _batches(records):
            names = [record.name for record in batch]
            count_in(done.removed, batch)
            self._catalog.lost(*batch)
            done.overwritten_bytes += self._tiers.delete(names, overwrite=overwrite)
            held += self._tiers.held(names)
        done.held = len(self._let_go(held))

    def _let_go(self, held: list[ObjectName]) -> list[ObjectName]:
        """Waits a while for those who hold deleted objects; what is written to Redis has arrived.

        Returns:
            What is held all the same.
        """
        pause, give_up_s = threading.Event(), time.monotonic() + self._patience_s
        while held and time.monotonic() < give_up_s:
            pause.wait(_PAUSE_S)
            held = self._tiers.held(held)
        return held

    def _delete_in_redis(
        self, namespaces: Collection[bytes], done: Erased, names: Collection[bytes] | None = None
    ) -> None:
        """Deletes what Redis has of namespaces, or of some prefixes in them."""
        if self._ledger is None:
            return
        for namespace in namespaces:
            try:
                keys = self._ledger.keys_of(namespace, names)
                for _ in range(_ROUNDS):
                    done.redis_keys += self._ledger.delete(keys) if keys else 0
                    keys = self._ledger.keys_of(namespace, names)
                    if not keys:
                        break
            except StoreUnavailable as error:
                raise StoreUnavailable(
                    f"the CPU tier was cleared, Redis was not: {error}"
                ) from error
            done.left_in_redis += len(keys)


def _batches(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    for at in range(0, len(records), _BATCH):
        yield records[at : at + _BATCH]
