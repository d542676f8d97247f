"""What the store knows: which prefixes, what of them exists where, and what is on its way in.

All of it changes under one lock, that of `Holdings`, and no I/O happens while that is held. What is
evicted is in `room.py`, and what has to do with Redis in `redis_catalog.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tailreplay.store.arrivals import Arrivals
from tailreplay.store.backlog import Backlog
from tailreplay.store.chain import digest_key
from tailreplay.store.errors import GeometryMismatch
from tailreplay.store.holdings import Holdings
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName, Provenance
from tailreplay.store.public_prefixes import PublicPrefixes
from tailreplay.store.public_scope import merged_path, parts_of, with_public
from tailreplay.store.redis_catalog import RedisCatalog
from tailreplay.store.room import Room
from tailreplay.store.worth import by_worth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tailreplay.store.arrivals import Arrived
    from tailreplay.store.geometry import Geometry
    from tailreplay.store.manifest import Manifests
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.quota import Limits, TierName
    from tailreplay.store.record import Record
    from tailreplay.store.shared_index import SharedIndex
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Match, Path

_SELECT_ROWS = 4096


class Catalog:
    """The store's knowledge. Thread-safe: every method takes the lock itself.

    Args:
        manifests: where commits are written; None without Redis.
        clock: seconds that only grow.
        max_blocks: above so many blocks in the index, what only Redis has is forgotten early.
        digest_key: gives the key of the running digests for a namespace.
        patience_s: longest that one Put waits for Redis to take what is in its way.

    Attributes:
        quotas: what each tenant uses, and may.
        public: what of the public scope is open to tenants.
        room: makes room in the CPU tier.
        backlog: makes it for those that put, who can wait for Redis.
        redis: commits in Redis, and lists what that has.
    """

    def __init__(
        self,
        manifests: Manifests | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_blocks: int = 1 << 20,
        digest_key: Callable[[bytes], bytes] = digest_key,
        patience_s: float = 2.0,
    ) -> None:
        held = self._held = Holdings(to_redis=manifests is not None)
        self.quotas = held.quotas
        self.public = PublicPrefixes()
        self.room = Room(held)
        self.backlog = Backlog(held, self.room, patience_s, clock)
        self.redis = RedisCatalog(held, manifests, clock, max_blocks, digest_key, self.backlog)
        self._lock, self._index, self._order = held.lock, held.index, held.order
        self._claims = held.claims
        self._arrivals = Arrivals(held.index, held.sums, held.order, held.claims)

    def attach(self, tiers: Tiers) -> None:
        """Names the tiers to evict from; they need this catalog's callbacks when they are made."""
        self.room.attach(tiers)
        self.backlog.attach(tiers)
        self.redis.attach(tiers)

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
        queried, counts = len(prompt), self._held.counts
        with self._lock:
            counts["lookups"] += 1
            counts["hits" if found.matched_tokens else "misses"] += 1
            counts["queried_tokens"] += queried
            counts["matched_tokens"] += found.matched_tokens
            counts["unmatched_tokens"] += queried - found.matched_tokens
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
        self.redis.learn(prompt, beyond)
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
        """As `path`, for a leaf that was matched in the public scope as well.

        Args:
            namespace: the reader's.
            public: namespace of the public scope.
            leaf: as the match gave it: the name in the reader's, then that in the public scope.
            hidden: as in `path`.
        """
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

        Args:
            prompt: in which it was offered.
            name: of the object.
            end_token: one past its last row.
            size: bytes with header.
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
            known = self._held.geometries.hold(namespace, geometry)
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
            self._held.counts["stored_bytes"] += sum(stored)
            ready = [one.name for one in arrived if self._claims.is_written(one.name)]
        self.redis.commit(ready)
        return listed

    def loaded(self, records: Sequence[Record]) -> list[Record]:
        """Notes that objects are in the CPU tier now.

        Returns:
            Those that were forgotten meanwhile, and are to be nowhere.
        """
        with self._lock:
            known = [r for r in records if r.exists]
            for record in known:
                if not record.in_cpu:
                    self._held.place(record, in_cpu=True)
            self._order.use(known)
            return [r for r in records if not r.exists]

    def late(self, records: Iterable[Record]) -> None:
        """Notes that objects did not come to the CPU tier in time; they may come there yet."""
        with self._lock:
            for record in records:
                self._held.place(record, in_cpu=False)
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
            self.redis.used(known)

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
            forgotten = self.redis.fields_of(records)
            self._claims.give_up(record.name for record in records)
            for record in records:
                self._held.place(record, in_cpu=False, in_redis=False)
                self._order.drop(record)
                self._index.trees.prune(record)
        self.redis.forget(forgotten)

    def select(self, wanted: Callable[[Record], bool]) -> list[Record]:
        """Objects that exist and are wanted; takes the lock a while at a time."""
        return [record for some in self.sweep(wanted) for record in some]

    def sweep(self, wanted: Callable[[Record], bool]) -> Iterator[list[Record]]:
        """As `select`, some at a time."""
        first, is_over = 0, False
        while not is_over:
            with self._lock:
                some, first = self._index.sweep.some(first, _SELECT_ROWS)
                found = [record for record in some if record.exists and wanted(record)]
            yield found
            is_over = not first

    def spaces(self) -> set[bytes]:
        """Namespaces that have blocks, or get some now."""
        with self._lock:
            return self._held.busy_spaces()

    def limit(self, tenant: bytes, limits: Limits) -> None:
        """Sets a tenant's limits; what is over stays until somebody makes room."""
        spaces = set(self.quotas.namespaces(tenant))
        records = self.select(lambda record: record.name.namespace in spaces)
        self.room.limit(tenant, limits, records)

    def count(self, what: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._held.counts[what] += by

    def figures(self) -> dict[str, int]:
        """Counters and sizes by name, taken at one instant."""
        with self._lock:
            return {
                **self._held.counts,
                "blocks": len(self._index),
                "redis_pending_bytes": self._claims.pending_bytes,
            }

    def tier_figures(self) -> dict[tuple[TierName, Kind], tuple[int, int]]:
        """Objects and bytes by tier ('cpu', 'redis') and kind."""
        with self._lock:
            return self._held.sums.by_tier()

    def namespaces(self) -> dict[bytes, tuple[int, int, dict[Kind, Geometry]]]:
        """Blocks, their tokens and known geometries of each namespace."""
        with self._lock:
            shapes = self._held.geometries.by_namespace()
            return {
                space: (blocks, tokens, shapes.get(space, {}))
                for space, (blocks, tokens) in self._index.trees.sizes().items()
            }

    def pooled(self) -> dict[bytes, tuple[int, int]]:
        """Tokens whose keys and values are in the pool, and bytes of all kinds, by namespace."""
        with self._lock:
            return self._held.sums.pooled()
