"""The catalog's half of Redis: what it is told to list, and what is listed because it has it.

Manifests are read and written here, never under the lock of the holdings.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tailreplay.store.batches import batches
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.fading import Fading
from tailreplay.store.manifest_form import entry_of
from tailreplay.store.redis_listing import RedisListing
from tailreplay.store.renewal import Renewal
from tailreplay.store.retelling import block_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailreplay.store.backlog import Backlog
    from tailreplay.store.claims import Due
    from tailreplay.store.holdings import Holdings
    from tailreplay.store.manifest import Manifests
    from tailreplay.store.objects import ObjectName
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.record import Record
    from tailreplay.store.shared_index import Beyond
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Block, BlockName

logger = logging.getLogger(__name__)

_LEARNT = 32
"""Blocks of a lookup's answer listed under one hold of the lock, two milliseconds."""

_RESTORED = 64
"""Manifests listed under one hold of the lock."""


class RedisCatalog:
    """Commits, restores, renews and forgets. Thread-safe; without Redis it does nothing.

    Every method takes the lock of the holdings itself, unless it says otherwise.

    Args:
        held: what there is.
        manifests: where commits are written; None without Redis.
        clock: seconds that only grow.
        max_blocks: above so many blocks in the index, what only Redis has is forgotten early.
        digest_key: gives the key of the running digests for a namespace.
        backlog: told of what Redis has taken, or will not take.
    """

    def __init__(
        self,
        held: Holdings,
        manifests: Manifests | None,
        clock: Callable[[], float],
        max_blocks: int,
        digest_key: Callable[[bytes], bytes],
        backlog: Backlog,
    ) -> None:
        self._digest_key = digest_key
        self._backlog = backlog
        self._held = held
        self._manifests = manifests
        self._clock = clock
        self._renewal: Renewal | None = None
        # Guarded by the lock of the holdings: what follows; the first are the commits under way.
        self._under_way: set[threading.Event] = set()
        life_s = 0.0 if manifests is None else manifests.ttl_s
        self._fading = Fading(held.index.trees, clock, life_s)
        self._listing = RedisListing(held.index, held.place, clock, max_blocks)

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers that renew payloads."""
        if self._manifests is not None:
            self._renewal = Renewal(self._manifests, tiers.renew)

    def stored(self, names: Sequence[ObjectName]) -> None:
        """Objects' payloads are in Redis; those already admitted are committed."""
        with self._held.lock:
            ready = self._held.claims.written(names)
        self._backlog.note_taken()
        self.commit(ready)

    def failed(self, names: Sequence[ObjectName]) -> None:
        """Objects will not get to Redis; they stay in the CPU tier alone."""
        with self._held.lock:
            self._held.claims.give_up(names)
            self._held.counts["redis_failed"] += len(names)
        self._backlog.note_move()

    def commit(self, names: Sequence[ObjectName]) -> None:
        """Writes the manifests of admitted objects whose payload is in Redis."""
        if not names or self._manifests is None:
            return
        is_over = threading.Event()
        with self._held.lock:
            due = self._held.claims.due(names)
            entries = [(one.home, entry_of(one.record)) for one in due]
            self._under_way.add(is_over)
        try:
            self._settle(due, self._manifests.commit(entries))
        finally:
            with self._held.lock:
                self._under_way.discard(is_over)
            is_over.set()

    def wait_for_commits(self, patience_s: float) -> None:
        """Waits until those commits are over that are under way now, or for so long."""
        give_up_s = time.monotonic() + patience_s
        with self._held.lock:
            under_way = list(self._under_way)
        for commit in under_way:
            commit.wait(max(0.0, give_up_s - time.monotonic()))

    def _settle(self, due: Sequence[Due], lives_s: Sequence[float]) -> None:
        """Notes what of a commit Redis has taken; what has gone meanwhile is taken back there."""
        held, overtaken = self._held, []
        taken = dict(zip(due, lives_s, strict=True))
        with held.lock:
            for one in (one for one in due if taken[one]):
                if held.claims.settle(one):
                    one.record.redis_until_s = self._clock() + taken[one]
                    held.place(one.record, in_redis=True)
                elif not (one.record.exists or held.claims.is_on_its_way(one.record.name)):
                    overtaken.append((one.home.called, entry_of(one.record).field))
        if any(lives for lives in taken.values()):
            self._backlog.note_taken()
        self.forget(overtaken)
        self.failed([one.record.name for one in due if not taken[one]])

    def homes(self, records: Sequence[Record]) -> list[tuple[Record, Block]]:
        """Objects that are still listed, each with a block whose manifest is to speak of it."""
        trees, told = self._held.index.trees, []
        keys = {space: self._digest_key(space) for space in {r.name.namespace for r in records}}
        with self._held.lock:
            for record in records:
                space = record.name.namespace
                for home in trees.homes(record)[:1]:
                    block = block_again(trees, home, space, keys[space])
                    if block is not None:
                        told.append((record, block))
        return told

    def servers_of(self, home: Block) -> set[int]:
        """Numbers of the servers that say what there is of a block."""
        return self._manifests.servers_of(home) if self._manifests is not None else set()

    def expect(self, objects: Sequence[tuple[Record, Block]]) -> list[ObjectName]:
        """Takes objects for being on their way to Redis once more, each with its block.

        Each ends with `stored` or `failed`. Returns the names of those that are not on their way,
        and that are still there to go.
        """
        claims, names = self._held.claims, []
        with self._held.lock:
            for record, home in objects:
                name = record.name
                if record.is_listed and record.exists and not claims.is_on_its_way(name):
                    claims.claim(name, record.size)
                    claims.arrive(name)
                    claims.admit(record, home)
                    names.append(name)
        return names

    def learn(self, prompt: Prompt, beyond: Beyond) -> None:
        """Lists what a lookup has read of in Redis."""
        for part in beyond.parts(_LEARNT):
            with self._held.lock:
                self._listing.learn(prompt, part)

    def restore(self, namespace: bytes = b"") -> int:
        """Lists what Redis holds already; returns how many objects that is.

        Args:
            namespace: of which, if not of all.

        Raises:
            StoreUnavailable: Redis can not be read.
        """
        if self._manifests is None:
            return 0
        manifests, listed = self._manifests.load(namespace=namespace), 0
        for some in batches(manifests, _RESTORED):
            with self._held.lock:
                listed += sum(self._listing.restore(block, entries) for block, entries in some)
        for at in range(len(manifests), 0, -_RESTORED):
            with self._held.lock:
                for block, _ in reversed(manifests[max(0, at - _RESTORED) : at]):
                    self._held.index.trees.prune_block(block.namespace, block.prefix_hash)
        return listed

    @property
    def is_whole(self) -> bool:
        """Whether the last `restore` has read every server."""
        return self._manifests is None or self._manifests.whole

    def used(self, records: Iterable[Record]) -> None:
        """Notes what was used and would expire before long; called under the lock."""
        self._fading.note(records)

    def renew_used(self) -> int:
        """Gives what was used and would expire another life in Redis; returns how many blocks."""
        with self._held.lock:
            fading = self._fading.take()
        if self._renewal is None or not fading:
            return 0
        renewed = set(self._renewal.renew(list(fading)))
        with self._held.lock:
            self._fading.renewed(renewed, fading)
        return len(renewed)

    def forget_expired(self, row: int) -> int:
        """Forgets some of what is in Redis no more; returns the row to go on from, 0 = the end."""
        held = self._held
        with held.lock:
            forgotten, row = self._listing.forget_some(row)
            held.counts["expired_objects"] += forgotten
            if not row:
                held.geometries.forget_all_but(held.busy_spaces())
        return row

    def gone(self, records: Sequence[Record]) -> None:
        """Forgets what Redis had of objects; the caller takes their payloads away there."""
        with self._held.lock:
            fields = self.fields_of(records)
            self._unlist(records)
        self.forget(fields)

    def lost(self, records: Sequence[Record]) -> None:
        """Forgets here what Redis has lost; it is told nothing, since others may write it anew."""
        with self._held.lock:
            self._unlist(records)

    def _unlist(self, records: Sequence[Record]) -> None:
        for record in records:
            self._held.place(record, in_redis=False)
            self._held.index.trees.prune(record)

    def fields_of(self, records: Iterable[Record]) -> list[tuple[BlockName, str]]:
        """Where manifests speak of objects: the block, and the field; called under the lock."""
        return [
            (home.called(record.name.namespace), entry_of(record).field)
            for record in records
            if record.in_redis
            for home in self._held.index.trees.homes(record)
        ]

    def forget(self, fields: Sequence[tuple[BlockName, str]]) -> None:
        """Takes fields of manifests away; does I/O, and needs no lock."""
        if not fields or self._manifests is None:
            return
        try:
            self._manifests.forget(fields)
        except StoreUnavailable as error:
            logger.debug("a manifest field outlives its payload: %s", error)
