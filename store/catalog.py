"""What the store knows: index, order of eviction, writes on their way to Redis, and counts.

All of it changes under one lock, and no I/O happens while that lock is held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.errors import GeometryMismatch, StoreUnavailable
from tailreplay.store.evictor import Evictor
from tailreplay.store.index import Path, TokenIndex
from tailreplay.store.manifest import Entry, Manifests, entry_of
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName, Provenance
from tailreplay.store.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tailreplay.store.geometry import Geometry
    from tailreplay.store.index import Block, Match, Node
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.tiers import Tiers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """An object on its way to Redis; committed there once it is both `written` and admitted."""

    size: int
    written: bool = False
    record: Record | None = None
    home: Block | None = None


class Catalog:
    """The store's knowledge. Thread-safe.

    Args:
        manifests: where commits are written; None without Redis.
    """

    def __init__(self, manifests: Manifests | None) -> None:
        self._manifests = manifests
        self._tiers: Tiers | None = None
        # Guarded by _lock: everything below.
        self._lock = threading.Lock()
        self._index = TokenIndex()
        self._evictor = Evictor()
        self._claims: set[ObjectName] = set()
        self._pending: dict[ObjectName, _Pending] = {}
        self._geometry: dict[tuple[bytes, Kind], Geometry] = {}
        self._counts: Counter[str] = Counter()
        self._objects: Counter[tuple[str, Kind]] = Counter()
        self._sizes: Counter[tuple[str, Kind]] = Counter()

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers to evict from; they need this catalog's callbacks when they are made."""
        self._tiers = tiers

    def match(self, prompt: Prompt) -> Match:
        """Longest stored prefix; counts it."""
        queried = len(prompt)
        with self._lock:
            found = self._index.match(prompt)
            self._counts["lookups"] += 1
            self._counts["hits" if found.matched_tokens else "misses"] += 1
            self._counts["queried_tokens"] += queried
            self._counts["matched_tokens"] += found.matched_tokens
            self._counts["unmatched_tokens"] += queried - found.matched_tokens
        return found

    def path(self, namespace: bytes, leaf: bytes) -> Path:
        """Objects of the blocks from the first to the one named `leaf`; empty if not known."""
        with self._lock:
            return self._index.path_to(namespace, leaf)

    def record(self, name: ObjectName) -> Record | None:
        """The record of a `kv` object or checkpoint whose payload exists in some tier."""
        with self._lock:
            record = self._index.record(name)
        return record if record is not None and record.exists else None

    def claim(self, prompt: Prompt, name: ObjectName, end_token: int, size: int) -> bool:
        """Claims an object for the caller to put; False when it exists or another put brings it.

        A claim ends with `admit` or `unclaim`.
        """
        with self._lock:
            record = self._index.find(prompt, name.kind, end_token)
            if (record is not None and record.exists) or name in self._claims:
                return False
            self._claims.add(name)
            if self._manifests is not None:
                # Before the tiers have it, since they may report it written at once.
                self._pending[name] = _Pending(size)
        return True

    def unclaim(self, name: ObjectName) -> None:
        """Ends a claim without an object."""
        with self._lock:
            self._claims.discard(name)
            self._pending.pop(name, None)

    def check_geometry(self, namespace: bytes, geometry: Geometry) -> None:
        """Holds every object of a namespace to the geometry of the first of its kind.

        Raises:
            GeometryMismatch: it is another one.
        """
        with self._lock:
            known = self._geometry.setdefault((namespace, geometry.kind), geometry)
        if known != geometry:
            raise GeometryMismatch(f"object has {geometry}, its namespace holds {known}")

    def admit(
        self,
        prompt: Prompt,
        name: ObjectName,
        end_token: int,
        size: int,
        provenance: Provenance,
        tail_figures: bytes = b"",
    ) -> None:
        """Lists an object that is now in the CPU tier, and commits it in Redis if it is there."""
        with self._lock:
            record, home = self._locate(prompt, name.kind, end_token)
            record.size, record.provenance = size, provenance
            record.tail_figures = tail_figures
            self._place(record, in_cpu=True)
            self._evictor.use([record])  # until `used` has put the whole prefix in order
            self._counts["stored_bytes"] += size
            self._claims.discard(name)
            self._supersede(record)
            pending = self._pending.get(name)
            if pending is not None:
                pending.record, pending.home = record, self._index.block(prompt, home)
        if pending is not None and pending.written:
            self._commit([name])

    def loaded(self, records: Sequence[Record]) -> None:
        """Notes that objects are in the CPU tier now."""
        with self._lock:
            known = [r for r in records if r.is_listed]
            for record in known:
                self._place(record, in_cpu=True)
            self._evictor.use(known)

    def late(self, records: Iterable[Record]) -> None:
        """Notes that objects did not come to the CPU tier in time; they may come there yet."""
        with self._lock:
            for record in records:
                self._place(record, in_cpu=False)
                if record.in_redis:
                    self._evictor.use([record])
                else:
                    self._evictor.forget(record)
                    self._index.prune(record)

    def used(self, records: Iterable[Record]) -> None:
        """Notes that objects of one prefix were used together; its late ones will go first."""
        with self._lock:
            self._evictor.use([r for r in records if r.in_cpu])

    def used_prefix(self, prompt: Prompt) -> None:
        """As `used`, of everything that a prompt has."""
        with self._lock:
            found = self._index.match(prompt)
            path = self._index.snapshot(found.rows)
        self.used([*found.checkpoints, *records_on(path, Kind.HIDDEN, Kind.KV)])

    def lost(self, record: Record) -> None:
        """Forgets an object that is in no tier any more, or must not be used again."""
        with self._lock:
            homes = [node.prefix_hash for node in self._index.homes(record)]
            was_in_redis = record.in_redis
            self._place(record, in_cpu=False, in_redis=False)
            self._pending.pop(record.name, None)
            self._evictor.forget(record)
            self._index.prune(record)
        if was_in_redis and self._manifests is not None:
            try:
                field = entry_of(record).field
                space = record.name.namespace
                self._manifests.forget((space, home, field) for home in homes)
            except StoreUnavailable as error:
                logger.debug("a manifest field outlives its payload: %s", error)

    def count(self, what: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[what] += by

    def make_room(self, size: int) -> bool:
        """Evicts about `size` bytes; False when nothing could be evicted, or all would not do.

        What is pinned or on its way to Redis stays.
        """
        tiers = self._tiers
        if tiers is None or size > tiers.pool_bytes:
            return False
        freed, stuck = 0, set[Record]()
        while freed < size:
            with self._lock:
                victims = self._evictor.victims(
                    size - freed, spare=lambda r: r in stuck or r.name in self._pending
                )
            if not victims:
                break
            freed += tiers.evict([r.name for r in victims])
            stuck.update(self._note_evicted(victims, tiers))
        self.count("evicted_bytes", freed)
        return freed > 0

    def redis_stored(self, names: Sequence[ObjectName]) -> None:
        """Objects' payloads are in Redis; those already admitted are committed."""
        with self._lock:
            ready = []
            for name in names:
                pending = self._pending.get(name)
                if pending is not None:
                    pending.written = True
                    if pending.record is not None:
                        ready.append(name)
        self._commit(ready)

    def redis_failed(self, names: Sequence[ObjectName]) -> None:
        """Objects will not get to Redis; they stay in the CPU tier alone."""
        with self._lock:
            for name in names:
                self._pending.pop(name, None)
            self._counts["redis_failed"] += len(names)

    def restore(self) -> int:
        """Lists what Redis holds already; returns how many objects that is.

        Raises:
            StoreUnavailable: Redis can not be read.
        """
        if self._manifests is None:
            return 0
        manifests = self._manifests.load()
        with self._lock:
            listed = sum(self._restore_block(block, entries) for block, entries in manifests)
            for block, _ in reversed(manifests):
                self._index.prune_block(block.namespace, block.prefix_hash)
        return listed

    def figures(self) -> dict[str, int]:
        """Counters and sizes by name, taken at one instant."""
        with self._lock:
            return {
                **self._counts,
                "blocks": len(self._index),
                "redis_pending_bytes": sum(p.size for p in self._pending.values()),
            }

    def tier_figures(self) -> dict[tuple[str, Kind], tuple[int, int]]:
        """Objects and bytes by tier ('cpu', 'redis') and kind."""
        with self._lock:
            return {key: (n, self._sizes[key]) for key, n in self._objects.items() if n}

    def namespaces(self) -> dict[bytes, tuple[int, int, dict[Kind, Geometry]]]:
        """Blocks, their tokens and known geometries of each namespace."""
        shapes: dict[bytes, dict[Kind, Geometry]] = {}
        with self._lock:
            for (space, kind), geometry in self._geometry.items():
                shapes.setdefault(space, {})[kind] = geometry
            return {
                space: (blocks, tokens, shapes.get(space, {}))
                for space, (blocks, tokens) in self._index.sizes().items()
            }

    # What follows is called under the lock, unless it says otherwise.

    def _place(
        self, record: Record, *, in_cpu: bool | None = None, in_redis: bool | None = None
    ) -> None:
        """Notes where an object is now, None = as before, and keeps the sums of it."""
        before = {"cpu": record.in_cpu, "redis": record.in_redis}
        record.in_cpu = record.in_cpu if in_cpu is None else in_cpu
        record.in_redis = record.in_redis if in_redis is None else in_redis
        for tier, now in (("cpu", record.in_cpu), ("redis", record.in_redis)):
            step = int(now) - int(before[tier])
            self._objects[tier, record.name.kind] += step
            self._sizes[tier, record.name.kind] += step * record.size

    def _locate(self, prompt: Prompt, kind: Kind, end_token: int) -> tuple[Record, Node]:
        """An object's record, and the block whose manifest speaks of it."""
        if kind is Kind.CHECKPOINT:
            record = self._index.checkpoint_of(prompt, end_token)
            return record, self._index.homes(record)[0]
        first = (end_token - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        node = self._index.insert(prompt, min(first + KV_BLOCK_TOKENS, len(prompt)))
        records = [node.kv] if kind is Kind.KV else node.hidden
        return next(r for r in records if r is not None and r.end_token == end_token), node

    def _supersede(self, record: Record) -> None:
        """Makes the partial block that a longer sibling extends the next to be evicted."""
        if record.name.kind is Kind.CHECKPOINT:
            return
        for old in records_on(self._index.extended_by(record), record.name.kind):
            if old.first_token == record.first_token and old.rows < record.rows:
                self._evictor.demote(old)

    def _note_evicted(self, victims: Sequence[Record], tiers: Tiers) -> list[Record]:
        """Notes which of the victims are gone, and returns the others; takes the lock itself."""
        with self._lock:
            # Asked under the lock, or `loaded` could come between the answer and its noting.
            resident = tiers.resident([r.name for r in victims])
            for record, here in zip(victims, resident, strict=True):
                if not here:
                    self._place(record, in_cpu=False)
                    self._evictor.forget(record)
                    self._index.prune(record)
        return [record for record, here in zip(victims, resident, strict=True) if here]

    def _commit(self, names: Sequence[ObjectName]) -> None:
        """Writes the manifests of admitted objects whose payload is in Redis; takes the lock."""
        if not names or self._manifests is None:
            return
        with self._lock:
            waiting = [(n, p) for n in names if (p := self._pending.get(n)) is not None]
            entries = [
                (p.home, entry_of(p.record))
                for _, p in waiting
                if p.record is not None and p.home is not None
            ]
        try:
            self._manifests.commit(entries)
        except StoreUnavailable as error:
            logger.debug("objects stay in the CPU tier alone: %s", error)
            self.redis_failed(names)
            return
        with self._lock:
            for name, pending in waiting:
                if self._pending.get(name) is pending and pending.record is not None:
                    del self._pending[name]
                    self._place(pending.record, in_redis=True)

    def _restore_block(self, block: Block, entries: Sequence[Entry]) -> int:
        node = self._index.restore(block)
        if node is None:
            return 0
        listed = 0
        for entry in entries:
            record = self._restored_record(block, node, entry)
            if record is not None and not record.exists:
                record.size, record.provenance = entry.size, entry.provenance
                record.tail_figures = entry.tail_figures
                self._place(record, in_redis=True)
                listed += 1
        return listed

    def _restored_record(self, block: Block, node: Node, entry: Entry) -> Record | None:
        if entry.kind is Kind.KV:
            return node.kv
        if entry.kind is Kind.HIDDEN:
            hidden = node.hidden
            return hidden[entry.page] if entry.page < len(hidden) else None
        name = ObjectName(block.namespace, Kind.CHECKPOINT, entry.state_hash)
        return self._index.checkpoint(node, name, entry.end_token, entry.state_digest)


def records_on(path: Path, *kinds: Kind) -> Iterator[Record]:
    """Records of payload along a path, ascending by token for each kind."""
    if Kind.HIDDEN in kinds:
        yield from path.hidden
    if Kind.KV in kinds:
        yield from path.kv
