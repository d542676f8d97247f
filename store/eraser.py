"""Forgets what operators want forgotten, in both tiers, and proves it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailreplay.store.batches import batches
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.tier_bytes import count_in, tier_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
        namespaces: those that were gone through.
        everything: whether those are all, known or not.
        names: of prefixes, if only those were to go; None = all of the namespaces.
        bulk_files: files deleted in bulk tiers that no index knew of.
        left_in_bulk: files that are there all the same.
        unlisted: bulk tiers of which that can not be said.
        stores: other stores that were asked to do the same.
        silent_stores: those of them that have not answered.
    """

    removed: Counter[tuple[TierName, Kind, str]] = field(default_factory=Counter)
    overwritten_bytes: int = 0
    held: int = 0
    redis_keys: int = 0
    left_in_cpu: int = 0
    left_in_redis: int = 0
    namespaces: set[bytes] = field(default_factory=set)
    everything: bool = False
    names: set[bytes] | None = None
    bulk_files: int = 0
    left_in_bulk: int = 0
    unlisted: int = 0
    stores: int = 0
    silent_stores: int = 0

    @property
    def objects(self) -> int:
        """Objects that have gone, in each tier."""
        return sum(n for (_, _, what), n in self.removed.items() if what == "objects")

    def counts(self) -> dict[str, Any]:
        """Fields that the answers to an erasure have in common."""
        return {
            "removed": tier_bytes(self.removed),
            "overwritten_bytes": self.overwritten_bytes,
            "held_objects": self.held,
            "redis_keys_deleted": self.redis_keys,
            "cpu_objects_left": self.left_in_cpu,
            "redis_keys_left": self.left_in_redis,
            "bulk_files_deleted": self.bulk_files,
            "bulk_files_left": self.left_in_bulk,
            "unlisted_bulk_tiers": self.unlisted,
            "stores": self.stores,
            "silent_stores": self.silent_stores,
        }

    def add(self, other: Erased) -> None:
        """Adds what was done in a CPU tier elsewhere, or once more."""
        self.removed.update(other.removed)
        self.overwritten_bytes += other.overwritten_bytes
        self.held += other.held
        self.left_in_cpu += other.left_in_cpu
        self.bulk_files += other.bulk_files
        self.left_in_bulk += other.left_in_bulk
        self.unlisted += other.unlisted
        self.namespaces |= other.namespaces


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

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """Namespaces of a tenant of which nobody else may know: bulk tiers' files outlive Redis."""
        return self._tiers.namespaces_of(tenant)

    def clear(self, namespaces: Collection[bytes] | None) -> Erased:
        """Forgets all objects of some namespaces, or of all; as `drop`, but overwrites nothing."""
        everything = namespaces is None
        spaces = self._catalog.namespaces() if namespaces is None else namespaces
        done = Erased(namespaces=set(spaces), everything=everything)
        self._drop(self._all_of(namespaces), done, in_redis=True)
        return done

    def drop(self, namespaces: Collection[bytes]) -> Erased:
        """Overwrites in the pool what there is of namespaces, and counts what is left of it.

        What Redis has of them stays, for `delete_in_redis`.
        """
        done = Erased(namespaces=set(namespaces))
        self._drop(self._all_of(namespaces), done, in_redis=False)
        done.left_in_cpu = len(self._all_of(namespaces))
        return done

    def drop_prefix(self, namespace: bytes, block: bytes) -> Erased:
        """As `drop`, of a block of the public scope and all that goes on from it.

        What other public prefixes have stays.
        """
        self._list_all_of(namespace)
        records = self._behind(namespace, block)
        names = {block, *(record.name.prefix_hash for record in records)}
        done = Erased(namespaces={namespace}, names=names)
        self._drop(records, done, in_redis=False)
        done.left_in_cpu = len(self._behind(namespace, block))
        return done

    def delete_in_redis(self, done: Erased) -> None:
        """Deletes what Redis has of what was dropped, known to the index or not, and counts.

        Raises:
            StoreUnavailable: Redis does not answer, so that there is no proof.
        """
        self._delete_in_redis(None if done.everything else done.namespaces, done, done.names)

    def drop_again(self, done: Erased, *, overwrite: bool) -> None:
        """Takes out what was read of in Redis before it was deleted there.

        Args:
            done: what was dropped.
            overwrite: whether to write zeros over it.
        """
        if self._tiers.has_bulk:  # which may have what Redis has not
            return
        records = [
            record
            for record in self._all_of(None if done.everything else done.namespaces)
            if record.in_redis and (done.names is None or record.name.prefix_hash in done.names)
        ]
        gone: list[Record] = []
        for batch in batches(records, _BATCH):
            there = self._tiers.exist([record.name for record in batch])
            gone += [r for r, is_there in zip(batch, there, strict=True) if is_there is False]
        if gone:  # else free room would be overwritten for nothing
            self._drop(gone, Erased(), in_redis=not overwrite)

    def sweep_in_redis(self, done: Erased) -> None:
        """Deletes what manifests hold of blocks in which Redis has nothing any more.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        if self._ledger is not None and (done.everything or done.namespaces):
            self._ledger.sweep(None if done.everything else done.namespaces)

    def _list_all_of(self, namespace: bytes) -> None:
        """Lists what other stores have put into Redis as well."""
        try:
            self._catalog.redis.restore(namespace)
        except StoreUnavailable as error:
            logger.debug("not all of a namespace is listed: %s", error)

    def _all_of(self, namespaces: Collection[bytes] | None) -> list[Record]:
        """What there is of namespaces; None = of all."""
        return self._catalog.select(lambda r: namespaces is None or r.name.namespace in namespaces)

    def _behind(self, namespace: bytes, block: bytes) -> list[Record]:
        is_open = self._catalog.public.has
        records = self._catalog.behind(namespace, block)
        return [record for record in records if not is_open(namespace, record.name.prefix_hash)]

    def _drop(self, records: Sequence[Record], done: Erased, *, in_redis: bool) -> None:
        """Takes objects out; overwrites those that are to go from Redis by themselves."""
        held: list[ObjectName] = []
        unwritten: dict[ObjectName, int] = {}
        for batch in batches(records, _BATCH):
            sizes = {record.name: record.size for record in batch}
            count_in(done.removed, batch)
            self._catalog.lost(*batch)
            size, later = self._tiers.delete(list(sizes), overwrite=not in_redis, in_redis=in_redis)
            done.overwritten_bytes += size
            unwritten |= {name: sizes[name] for name in later}
            held += self._tiers.held(list(sizes))
        still = self._let_go(held)
        done.held = len(still)
        done.overwritten_bytes += sum(unwritten[name] for name in unwritten.keys() - still)
        self._catalog.redis.wait_for_commits(self._patience_s)
        if not in_redis:
            self._tiers.overwrite_free()  # where what was evicted or cleared before may lie
            self._drop_unknown(done)

    def _drop_unknown(self, done: Erased) -> None:
        """Deletes what bulk tiers have that expired in Redis, or was flushed there."""
        for found in self._tiers.delete_unknown(done.namespaces, done.names):
            if found is None:
                done.unlisted += 1
            else:
                done.bulk_files += found[0]
                done.left_in_bulk += found[1]

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
        self, namespaces: Collection[bytes] | None, done: Erased, names: Collection[bytes] | None
    ) -> None:
        """Deletes what Redis has of namespaces, None = of all, or of some prefixes in them."""
        if self._ledger is None or (namespaces is not None and not namespaces):
            return
        keys = self._ledger.keys_of(namespaces, names)
        for _ in range(_ROUNDS):
            done.redis_keys += self._ledger.delete(keys) if keys else 0
            keys = self._ledger.keys_of(namespaces, names)
            if not keys:
                break
        done.left_in_redis += len(keys)
