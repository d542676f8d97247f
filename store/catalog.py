"""What the store knows: index, order of eviction, writes on their way to Redis, and counts.

All of it changes under one lock, and no I/O happens while that lock is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from tailreplay.store.arrivals import Arrivals
from tailreplay.store.claims import Claims
from tailreplay.store.errors import GeometryMismatch, StoreUnavailable
from tailreplay.store.eviction_order import EvictionOrder
from tailreplay.store.fading import Fading
from tailreplay.store.geometries import Geometries
from tailreplay.store.index import TokenIndex
from tailreplay.store.manifest import Manifests
from tailreplay.store.manifest_form import entry_of
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName, Provenance
from tailreplay.store.public_prefixes import PublicPrefixes
from tailreplay.store.public_scope import merged_path, parts_of, with_public
from tailreplay.store.quota import Quotas
from tailreplay.store.record import Record
from tailreplay.store.redis_listing import RedisListing
from tailreplay.store.renewal import Renewal
from tailreplay.store.sums import Sums
from tailreplay.store.worth import by_worth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tailreplay.store.arrivals import Arrived
    from tailreplay.store.geometry import Geometry
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.quota import Limits, TierName
    from tailreplay.store.shared_index import SharedIndex
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import BlockName, Match, Path

logger = logging.getLogger(__name__)

_LEARNT = 32
"""Blocks of a lookup's answer listed under one hold of the lock, two milliseconds."""

_RESTORED = 64
"""Manifests listed under one hold of the lock."""

_SELECT_ROWS = 4096


class Catalog:
    """The store's knowledge. Thread-safe.

    Args:
        manifests: where commits are written; None without Redis.
        clock: seconds that only grow.
        max_blocks: above so many blocks in the index, what only Redis has is forgotten early.

    Attributes:
        quotas: what each tenant uses, and may.
        public: what of the public scope is open to tenants.
    """

    def __init__(
        self,
        manifests: Manifests | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_blocks: int = 1 << 20,
    ) -> None:
        self.quotas = Quotas()
        self.public = PublicPrefixes()
        self._manifests = manifests
        self._clock = clock
        self._tiers: Tiers | None = None
        # Guarded by _lock: everything below.
        self._lock = threading.Lock()
        self._index = TokenIndex()
        self._renewal: Renewal | None = None
        life_s = 0.0 if manifests is None else manifests.ttl_s
        self._fading = Fading(self._index.trees, clock, life_s)
        self._sums = Sums(self.quotas)
        self._place = self._sums.place
        self._listing = RedisListing(self._index, self._place, clock, max_blocks)
        self._order = EvictionOrder(self.quotas)
        self._claims = Claims(to_redis=manifests is not None)
        self._arrivals = Arrivals(self._index, self._sums, self._order, self._claims)
        self._geometries = Geometries()
        self._counts: Counter[str] = Counter()

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers to evict from; they need this catalog's callbacks when they are made."""
        self._tiers = tiers
        if self._manifests is not None:
            self._renewal = Renewal(self._manifests, tiers.renew)

    def match(
        self, prompt: Prompt, shared: SharedIndex | None = None, public: Prompt | None = None
    ) -> Match:
        """Longest stored prefix; counts it.

        Args:
            prompt: what is looked for.
            shared: who is asked for what lies beyond the keys and values that are known here.
            public: what of the prompt is open in the public scope; None = nothing.
        """
        found = self._find(prompt, shared)
        whole = len(prompt) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        if public is not None and found.kv_tokens < whole:
            found = with_public(found, self._find(public, shared), prompt)
        queried = len(prompt)
        with self._lock:
            self._counts["lookups"] += 1
            self._counts["hits" if found.matched_tokens else "misses"] += 1
            self._counts["queried_tokens"] += queried
            self._counts["matched_tokens"] += found.matched_tokens
            self._counts["unmatched_tokens"] += queried - found.matched_tokens
        return found

    def _find(self, prompt: Prompt, shared: SharedIndex | None) -> Match:
        """Longest stored prefix; takes the lock itself."""
        with self._lock:
            found = self._index.match(prompt)
            known = found.kv_tokens
            at = known // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
            if shared is None or known == len(prompt):
                return found
            self._index.tell(prompt, found, at)
        beyond = shared.beyond(prompt, at, known - at)
        if beyond is None:
            return found
        for part in beyond.parts(_LEARNT):
            with self._lock:
                self._listing.learn(prompt, part)
        with self._lock:
            return self._index.match(prompt)

    def peek(self, prompt: Prompt) -> tuple[Match, Path]:
        """As `match`, not counted, and the objects along it."""
        with self._lock:
            found = self._index.match(prompt)
            return found, self._index.paths.snapshot(found.rows)

    def path(self, namespace: bytes, leaf: bytes, *, hidden: bool = True) -> Path:
        """Objects of the blocks from the first to the one named `leaf`; empty if not known."""
        with self._lock:
            return self._index.paths.to(namespace, leaf, hidden=hidden)

    def path_with_public(
        self, namespace: bytes, public: bytes, leaf: bytes, *, hidden: bool = True
    ) -> Path:
        """As `path`, for a leaf that was matched in the public scope as well."""
        own, opened = parts_of(leaf)
        with self._lock:
            path = self._index.paths.to(namespace, own, hidden=hidden)
            if not self.public.has(public, opened):
                return path
            return merged_path(path, self._index.paths.to(public, opened, hidden=hidden))

    def public_state(self, public: bytes, prefix_hash: bytes) -> Record | None:
        """As `record`, of a checkpoint in the public scope; None if it is not open to tenants."""
        if not self.public.has(public, prefix_hash):
            return None
        return self.record(ObjectName(public, Kind.CHECKPOINT, prefix_hash))

    def blocks_to(self, namespace: bytes, leaf: bytes) -> list[bytes]:
        """Names of the whole blocks on the way to the one named `leaf`; empty if not known."""
        with self._lock:
            nodes = self._index.paths.nodes_to(namespace, leaf)
            return [node.prefix_hash for node in nodes if node.tokens == KV_BLOCK_TOKENS]

    def behind(self, namespace: bytes, block: bytes) -> list[Record]:
        """Objects that exist of a block and of all that goes on from it; as `select`."""
        return self.select(
            lambda r: r.name.namespace == namespace and self._index.paths.is_behind(r, block)
        )

    def record(self, name: ObjectName) -> Record | None:
        """The record of a `kv` object or checkpoint whose payload exists in some tier."""
        with self._lock:
            record = self._index.record(name)
        return record if record is not None and record.exists else None

    def claim(self, prompt: Prompt, name: ObjectName, end_token: int, size: int) -> bool:
        """Claims an object for the caller to put; False when it exists or another put brings it.

        One that exists but is approximate may be put again, since what comes may be exact.
        A claim ends with `admit` or `unclaim`.
        """
        with self._lock:
            record = self._index.named(prompt, name, end_token)
            if record is not None and record.exists and record.provenance is Provenance.EXACT:
                self._index.recognise(prompt, record)
                return False
            if name in self._claims:
                return False
            self._claims.claim(name, size)
        return True

    def unclaim(self, name: ObjectName) -> None:
        """Ends a claim without an object."""
        with self._lock:
            self._claims.release(name)

    def check_geometry(self, namespace: bytes, geometry: Geometry) -> None:
        """Holds every object of a namespace to the geometry of the first of its kind.

        Raises:
            GeometryMismatch: it is another one.
        """
        with self._lock:
            known = self._geometries.hold(namespace, geometry)
        if known != geometry:
            raise GeometryMismatch(f"object has {geometry}, its namespace holds {known}")

    def admit(self, prompt: Prompt, arrived: Sequence[Arrived]) -> list[bool]:
        """Lists objects that are now in the CPU tier, and commits in Redis those that are there.

        Args:
            prompt: whose; in order, so that what comes first is listed first.
            arrived: what each of them is.

        Returns:
            Whether each is listed. It is not where too many blocks before it have nothing stored:
            an object far into an unknown prompt would cost the index more than it is worth.
        """
        with self._lock:
            listed = self._arrivals.list(prompt, arrived)
            stored = [one.size for one, is_listed in zip(arrived, listed, strict=True) if is_listed]
            self._counts["stored_bytes"] += sum(stored)
            ready = [one.name for one in arrived if self._claims.is_written(one.name)]
        self._commit(ready)
        return listed

    def loaded(self, records: Sequence[Record]) -> None:
        """Notes that objects are in the CPU tier now."""
        with self._lock:
            known = [r for r in records if r.is_listed]
            for record in known:
                if not record.in_cpu:
                    self._place(record, in_cpu=True)
            self._order.use(known)

    def late(self, records: Iterable[Record]) -> None:
        """Notes that objects did not come to the CPU tier in time; they may come there yet."""
        with self._lock:
            for record in records:
                self._place(record, in_cpu=False)
                if record.in_redis:
                    self._order.use([record])
                else:
                    self._order.forget(record)
                    self._index.trees.prune(record)

    def used(self, records: Iterable[Record]) -> None:
        """Notes that objects of one prefix were read together; its late ones will go first."""
        with self._lock:
            known = [r for r in records if r.is_listed]
            for record in known:
                record.note_fetch()
            self._order.use_together(known)
            self._fading.note(known)

    def renew_used(self) -> int:
        """Gives what was used and would expire another life in Redis; returns how many blocks."""
        with self._lock:
            fading = self._fading.take()
        if self._renewal is None or not fading:
            return 0
        renewed = set(self._renewal.renew(list(fading)))
        with self._lock:
            self._fading.renewed(renewed, fading)
        return len(renewed)

    def used_prefix(self, prompt: Prompt) -> None:
        """Notes that something was stored of a prompt: what has little worth now goes first."""
        with self._lock:
            found = self._index.match(prompt)
            path = self._index.paths.stored_on(found.rows)
        worth, little = by_worth(found, path)
        with self._lock:
            self._order.use_together([r for r in worth if r.is_listed])
            for record in little:
                self._order.demote(record)

    def lost(self, *records: Record) -> None:
        """Forgets objects that are in no tier any more, or must not be used again."""
        with self._lock:
            forgotten = self._fields_of(records)
            self._claims.give_up(record.name for record in records)
            for record in records:
                self._place(record, in_cpu=False, in_redis=False)
                self._order.drop(record)
                self._index.trees.prune(record)
        self._forget_in_redis(forgotten)

    def no_longer_in_redis(self, records: Sequence[Record]) -> None:
        """Forgets what Redis had of objects; the caller takes their payloads away there."""
        with self._lock:
            forgotten = self._fields_of(records)
            for record in records:
                self._place(record, in_redis=False)
                self._index.trees.prune(record)
        self._forget_in_redis(forgotten)

    def select(self, wanted: Callable[[Record], bool]) -> list[Record]:
        """Objects that exist and are wanted; takes the lock a while at a time."""
        found: list[Record] = []
        first = 0
        while True:
            with self._lock:
                some, first = self._index.sweep.some(first, _SELECT_ROWS)
                found += [record for record in some if record.exists and wanted(record)]
            if not first:
                return found

    def spaces(self) -> set[bytes]:
        """Namespaces that have blocks, or get some now."""
        with self._lock:
            return self._busy_spaces()

    def limit(self, tenant: bytes, limits: Limits) -> None:
        """Sets a tenant's limits; what is over stays until somebody makes room."""
        spaces = set(self.quotas.namespaces(tenant))
        records = self.select(lambda record: record.name.namespace in spaces)
        with self._lock:
            self._order.limit(tenant, limits, [r for r in records if r.is_listed])

    def idle_s(self, record: Record) -> float:
        """Seconds since an object's last use; 0 where the CPU tier does not have it."""
        with self._lock:
            return self._order.idle_s(record)

    def keep(self, records: Iterable[Record]) -> None:
        """Takes objects out of eviction, once more for each time."""
        with self._lock:
            self._order.keep(records)

    def release(self, records: Iterable[Record]) -> None:
        """Undoes one `keep` of each; they count as used now."""
        with self._lock:
            self._order.release(records)

    def is_kept(self, record: Record) -> bool:
        """Whether it is out of eviction."""
        with self._lock:
            return self._order.is_kept(record)

    def count(self, what: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[what] += by

    def is_limited(self, namespace: bytes) -> bool:
        """Whether the tenant of a namespace has a limit in the CPU tier."""
        return self.quotas.limits(self.quotas.owner(namespace)).of("cpu") is not None

    def allow(self, namespace: bytes, size: int) -> bool:
        """Whether a tenant may have so much more in the CPU tier; its own oldest objects go first.

        Args:
            namespace: one of the tenant's.
            size: bytes.
        """
        tenant = self.quotas.owner(namespace)
        over = self.quotas.over(tenant, "cpu", size)
        if over and self.make_room(over, tenant):
            over = self.quotas.over(tenant, "cpu", size)
        if over:
            self.quotas.refused(tenant)
        return not over

    def make_room(self, size: int, tenant: bytes | None = None) -> bool:
        """Evicts about `size` bytes; False when nothing could be evicted, or all would not do.

        What is pinned or on its way to Redis stays.

        Args:
            size: wanted, bytes.
            tenant: whose objects go, because of its limits; None = anybody's.
        """
        tiers = self._tiers
        if tiers is None or size > tiers.pool_bytes:
            return False
        freed, stuck = 0, set[Record]()
        while freed < size:
            with self._lock:
                victims = self._order.victims(
                    size - freed, tenant, lambda r: r in stuck or self._claims.is_pending(r.name)
                )
            if not victims:
                break
            freed += tiers.evict([r.name for r in victims])
            stuck.update(self._note_evicted(victims, tiers))
        self.count("evicted_bytes", freed)
        if tenant is not None:
            self.quotas.evicted(tenant, freed)
        return freed > 0

    def redis_stored(self, names: Sequence[ObjectName]) -> None:
        """Objects' payloads are in Redis; those already admitted are committed."""
        with self._lock:
            ready = self._claims.written(names)
        self._commit(ready)

    def redis_failed(self, names: Sequence[ObjectName]) -> None:
        """Objects will not get to Redis; they stay in the CPU tier alone."""
        with self._lock:
            self._claims.give_up(names)
            self._counts["redis_failed"] += len(names)

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
        for at in range(0, len(manifests), _RESTORED):
            with self._lock:
                some = manifests[at : at + _RESTORED]
                listed += sum(self._listing.restore(block, entries) for block, entries in some)
        for at in range(len(manifests), 0, -_RESTORED):
            with self._lock:
                for block, _ in reversed(manifests[max(0, at - _RESTORED) : at]):
                    self._index.trees.prune_block(block.namespace, block.prefix_hash)
        return listed

    def forget_expired(self, row: int) -> int:
        """Forgets some of what is in Redis no more; returns the row to go on from, 0 = the end."""
        with self._lock:
            forgotten, row = self._listing.forget_some(row)
            self._counts["expired_objects"] += forgotten
            if not row:
                self._geometries.forget_all_but(self._busy_spaces())
        return row

    def figures(self) -> dict[str, int]:
        """Counters and sizes by name, taken at one instant."""
        with self._lock:
            return {
                **self._counts,
                "blocks": len(self._index),
                "redis_pending_bytes": self._claims.pending_bytes,
            }

    def tier_figures(self) -> dict[tuple[TierName, Kind], tuple[int, int]]:
        """Objects and bytes by tier ('cpu', 'redis') and kind."""
        with self._lock:
            return self._sums.by_tier()

    def namespaces(self) -> dict[bytes, tuple[int, int, dict[Kind, Geometry]]]:
        """Blocks, their tokens and known geometries of each namespace."""
        with self._lock:
            shapes = self._geometries.by_namespace()
            return {
                space: (blocks, tokens, shapes.get(space, {}))
                for space, (blocks, tokens) in self._index.trees.sizes().items()
            }

    def pooled(self) -> dict[bytes, tuple[int, int]]:
        """Tokens whose keys and values are in the pool, and bytes of all kinds, by namespace."""
        with self._lock:
            return self._sums.pooled()

    # What follows is called under the lock, unless it says otherwise.

    def _fields_of(self, records: Iterable[Record]) -> list[tuple[BlockName, str]]:
        """Where manifests speak of objects: the block, and the field."""
        return [
            (home.called(record.name.namespace), entry_of(record).field)
            for record in records
            if record.in_redis
            for home in self._index.trees.homes(record)
        ]

    def _forget_in_redis(self, fields: Sequence[tuple[BlockName, str]]) -> None:
        """Takes fields of manifests away; does I/O, not under the lock."""
        if not fields or self._manifests is None:
            return
        try:
            self._manifests.forget(fields)
        except StoreUnavailable as error:
            logger.debug("a manifest field outlives its payload: %s", error)

    def _busy_spaces(self) -> set[bytes]:
        """Namespaces that have blocks, or get some now."""
        return {*self._index.trees.sizes(), *self._claims.namespaces()}

    def _note_evicted(self, victims: Sequence[Record], tiers: Tiers) -> list[Record]:
        """Notes which of the victims are gone, and returns the others; takes the lock itself."""
        with self._lock:
            # Asked under the lock, or `loaded` could come between the answer and its noting.
            resident = tiers.resident([r.name for r in victims])
            for record, here in zip(victims, resident, strict=True):
                if not here:
                    self._place(record, in_cpu=False)
                    self._order.forget(record)
                    self._index.trees.prune(record)
        return [record for record, here in zip(victims, resident, strict=True) if here]

    def _commit(self, names: Sequence[ObjectName]) -> None:
        """Writes the manifests of admitted objects whose payload is in Redis; takes the lock."""
        if not names or self._manifests is None:
            return
        with self._lock:
            due = self._claims.due(names)
            entries = [(one.home, entry_of(one.record)) for one in due]
        taken = self._manifests.commit(entries)
        with self._lock:
            for one, life_s in zip(due, taken, strict=True):
                if life_s and self._claims.settle(one):
                    one.record.redis_until_s = self._clock() + life_s
                    self._place(one.record, in_redis=True)
        self.redis_failed(
            [one.record.name for one, life_s in zip(due, taken, strict=True) if not life_s]
        )


def records_on(path: Path, *kinds: Kind) -> Iterator[Record]:
    """Records of payload along a path, ascending by token for each kind."""
    if Kind.HIDDEN in kinds:
        yield from path.hidden
    if Kind.KV in kinds:
        yield from path.kv
