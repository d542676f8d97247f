"""The store without its wire: tiers, catalog and leases put together, opened and closed."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import tokens as wire_tokens
from tailreplay.store.abandoned import Abandoned, Guarded
from tailreplay.store.access import file_mode
from tailreplay.store.administration import Administration
from tailreplay.store.auth import ANYONE, Principal, Role
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.client_names import ClientNames
from tailreplay.store.config import INDEX_BLOCK_BYTES
from tailreplay.store.damage import Damage
from tailreplay.store.description import description_of, stats_of
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.frames import Frame
from tailreplay.store.lane_wire import LaneRecord, Pace, RecordKind
from tailreplay.store.leases import Lease, Leases
from tailreplay.store.namespace import NAMESPACE_BYTES, tenant_digest
from tailreplay.store.objects import Kind
from tailreplay.store.pool import Pool, SharedMemory
from tailreplay.store.prompt import Prompt
from tailreplay.store.put_session import PutSession
from tailreplay.store.reader import PinLimits, Reader
from tailreplay.store.redis_settings import (
    bulk_tiers,
    redis_epochs,
    redis_manifests,
    redis_shared_index,
    redis_tier,
)
from tailreplay.store.refill import Refill
from tailreplay.store.sightings import Sightings
from tailreplay.store.tiers import Tiers
from tailreplay.store.upkeep import Upkeep
from tailreplay.store.urgent_gate import UrgentGate
from tailreplay.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tailreplay.store.config import StoreConfig
    from tailreplay.store.record import Record
    from tailreplay.store.runs import Run

logger = logging.getLogger(__name__)

_FLUSH_STEP_S = 0.01
_SIGHTINGS = 1 << 17


class Store:
    """One store: what it holds, and the three things one can do with it.

    Args:
        config: its settings.
        clock: seconds that only grow; stepped by tests.
        before_rows: called before rows are sent; tests hold bulk rows back here.

    Raises:
        StoreUnavailable: another store runs with the same listen address.
        LimitExceeded: there is no room for a pool.

    Attributes:
        admin: what operators can do.
        client_names: what clients call namespaces.
        streams: ends those that nobody has any more.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        before_rows: Callable[[Kind], None] | None = None,
    ) -> None:
        self.config = config
        self.boot_id = secrets.randbits(64)
        self.started_at_s = time.time()
        self._clock = clock
        self.leases = Leases(config.stall_limit_s, clock)
        self._puts = Leases(config.put_stall_limit_s, clock)
        self.manifests = redis_manifests(config)
        self._shared = redis_shared_index(config, clock)
        self._digest_key = partial(digest_key, secret=config.digest_secret)
        self.catalog = Catalog(
            self.manifests,
            clock=clock,
            max_blocks=config.index_bytes // INDEX_BLOCK_BYTES,
            digest_key=self._digest_key,
            patience_s=config.put_patience_s,
        )
        self.tiers = _tiers(config, self.catalog, clock)
        self.catalog.attach(self.tiers)
        self.client_names = ClientNames(scoped=config.token_file is not None)
        self.streams = Abandoned()
        self._damage = Damage(
            self.catalog, self.tiers, timeout_s=config.tier_timeout_s, clock=clock
        )
        self._reader = Reader(
            self.catalog,
            self.tiers,
            damage=self._damage,
            limits=_pin_limits(config, self.tiers.pool_bytes),
            before_rows=before_rows,
            verify_placed=config.verify == "always",
        )
        self._writer = Writer(
            self.catalog,
            self.tiers,
            digest_key=self._digest_key,
            max_object_bytes=config.max_object_bytes,
            sightings=Sightings(_SIGHTINGS) if config.admit == "second" else None,
        )
        self.admin = Administration(
            config,
            self.catalog,
            self.tiers,
            self.client_names,
            store_id=self.boot_id.to_bytes(8, "little"),
            clock=clock,
        )
        self._closing = threading.Event()
        self._upkeep = Upkeep(
            self.catalog,
            self.tiers,
            self.admin,
            leases=(self.leases, self._puts),
            refill=self._refill(),
            clock=clock,
        )
        self._upkeep.start()

    def match(self, request: pb.MatchRequest, caller: Principal = ANYONE) -> pb.MatchResponse:
        """What is stored along the longest stored prefix.

        Raises:
            InvalidRequest: the namespace or the tokens are malformed.
        """
        namespace = _scoped(request.namespace, caller)
        tokens = wire_tokens.from_wire(request.tokens)
        prompt = Prompt(namespace, tokens, self._digest_key(namespace), request.namespace)
        opened = self._opened(prompt, caller)
        found = self.catalog.match(prompt, self._shared, opened)
        if found.matched_tokens:
            for space in (namespace, *([opened.namespace] if opened is not None else [])):
                self.client_names.note(space, request.namespace)
        return pb.MatchResponse(
            matched_tokens=found.matched_tokens,
            leaf=found.leaf,
            runs=[_run(run) for run in found.runs],
            checkpoints=[_checkpoint(record) for record in found.checkpoints],
            boot_id=self.boot_id,
            default_mode=self.catalog.quotas.mode(self.catalog.quotas.owner(namespace)),
        )

    def _opened(self, prompt: Prompt, caller: Principal) -> Prompt | None:
        """As much of a prompt as is open to a tenant in the public scope; nothing else is asked."""
        public = caller.public(prompt.sent_namespace)
        end = self.catalog.public.open_tokens(public, prompt) if public is not None else 0
        if public is None or not end:
            return None
        key = self._digest_key(public)
        return Prompt(public, prompt.tokens[:end], key, prompt.sent_namespace)

    def fetch(
        self,
        request: pb.FetchRequest,
        cancel: Callable[[], object],
        *,
        is_gone: Callable[[], bool] = lambda: False,
        placed: bool = False,
        caller: Principal = ANYONE,
    ) -> Guarded[Frame]:
        """Rows of stored objects, under a lease that ends with the iterator.

        Args:
            request: what is wanted.
            cancel: ends the stream if its reader stalls.
            is_gone: whether its reader has left, so that nothing need be waited for.
            placed: whether the reader copies rows out of shared memory itself, and says at each
                end of a window that it has.
            caller: who reads.

        Raises:
            InvalidRequest: the namespace or a range is malformed.
        """
        public = caller.public(request.namespace)
        request.namespace = _scoped(request.namespace, caller)
        frames = self._reader.frames(request, public, placed=placed, is_gone=is_gone)
        return self.streams.guard(self._leased(frames, cancel))

    def _leased(
        self, answer: Generator[Frame, None, None], cancel: Callable[[], object]
    ) -> Generator[Frame, None, None]:
        """An answer, under a lease."""
        lease = self.leases.grant(cancel)
        try:
            stall_limit_ms = int(self.leases.stall_limit_s * 1000)
            granted = LaneRecord(RecordKind.LEASE, offset=stall_limit_ms)
            yield Frame(granted, (memoryview(lease.lease_id),))
            self.leases.rest(lease)
            with closing(answer) as frames:
                for frame in frames:
                    if not self.leases.renew(lease):
                        return
                    yield frame
                    self.leases.rest(lease)
        finally:
            self.leases.end(lease.lease_id)

    def put(
        self,
        frames: Iterator[pb.PutFrame],
        cancel: Callable[[], object],
        caller: Principal = ANYONE,
    ) -> pb.PutResponse:
        """Stores a stream of objects; as `Writer.put`.

        Args:
            frames: what the writer sends.
            cancel: ends the stream if its writer stalls, so that `frames` raises.
            caller: who writes.
        """
        lease = self._puts.grant(cancel)
        try:
            return self._writer.put(
                self._watched(frames, lease), lambda begin: self._owned(begin, caller)
            )
        finally:
            self._puts.end(lease.lease_id)

    def _watched(self, frames: Iterator[pb.PutFrame], lease: Lease) -> Iterator[pb.PutFrame]:
        """The frames; the lease's clock, and the writer's, run only while one is waited for."""
        pace = Pace(self.config.put_stall_limit_s, self._clock)
        while True:
            self._puts.renew(lease)
            started_s = self._clock()
            frame = next(frames, None)
            self._puts.rest(lease)
            if frame is None:
                return
            try:
                pace.note(self._clock() - started_s, frame.ByteSize())
            except TimeoutError as error:
                raise StoreUnavailable(f"a Put was too slow: {error}") from None
            yield frame

    def open_put(self, begin: pb.PutBegin, caller: Principal = ANYONE) -> PutSession:
        """Starts storing objects of one prefix; as `Writer.open`."""
        return self._writer.open(begin, self._owned(begin, caller))

    def _owned(self, begin: pb.PutBegin, caller: Principal) -> bytes:
        """Where the objects of a Put belong, once it is known that they are the caller's."""
        namespace = _scoped(begin.namespace, caller)
        named = caller.role is not Role.ANYONE  # then its token says whose they are
        tenant = tenant_digest(caller.tenant) if named else begin.tenant
        self.catalog.quotas.own(namespace, tenant)
        self.client_names.note(namespace, begin.namespace)
        return namespace

    def report_damage(
        self, request: pb.ReportDamageRequest, caller: Principal = ANYONE
    ) -> pb.ReportDamageResponse:
        """Looks at an object that a reader says came damaged, and drops it if it is so.

        Raises:
            InvalidRequest: the namespace is malformed.
        """
        public = caller.public(request.namespace)
        request.namespace = _scoped(request.namespace, caller)
        return self._damage.report(request, public, caller.tenant)

    def stats(self) -> pb.StatsResponse:
        """Counters and sizes, as of now."""
        return stats_of(self)

    def describe(self, caller: Principal = ANYONE) -> pb.DescribeResponse:
        """What this store is, as far as a caller may know."""
        return description_of(self, caller)

    def redis_in_words(self) -> str:
        """Whether there is a Redis, for the log."""
        if self.config.redis_url is None:
            return "off"
        return "on" if self.tiers.redis_status().get("healthy") else "configured, but down"

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was acknowledged is in Redis; False when that takes too long."""
        end_s = time.monotonic() + timeout_s
        while (status := self.tiers.redis_status())["healthy"] and status["pending_bytes"]:
            if time.monotonic() >= end_s:
                return False
            self._closing.wait(_FLUSH_STEP_S)
        return not status.get("pending_bytes")

    def close(self) -> None:
        """Gives back memory and connections; what is in Redis stays there."""
        self._closing.set()
        self._upkeep.stop()
        self.admin.close(has_redis=bool(self.tiers.redis_status().get("healthy")))
        self.streams.close()
        self._reader.close()
        self.tiers.close()
        if self.manifests is not None:
            self.manifests.close()
        if self._shared is not None:
            self._shared.close()

    def _refill(self) -> Refill | None:
        epochs = redis_epochs(self.config)
        if epochs is None:
            return None
        return Refill(self.catalog, self.tiers, epochs, self.admin.redis_lost, self._clock)


def _tiers(config: StoreConfig, catalog: Catalog, clock: Callable[[], float]) -> Tiers:
    """The pool and what is behind it, which tells the catalog what got there."""
    pool = Pool(
        _identity(config.listen),
        config.pool_bytes,
        _shared_memory(config),
        config.access_gid,
        None if config.share_memory_mode is None else file_mode(config.share_memory_mode),
    )
    return Tiers(
        pool,
        redis=redis_tier(config),
        bulk=bulk_tiers(config),
        on_redis_stored=catalog.redis.stored,
        on_redis_failed=catalog.redis.failed,
        gate=UrgentGate(clock=clock),
    )


def _pin_limits(config: StoreConfig, pool_bytes: int) -> PinLimits:
    return PinLimits(
        config.fetch_window_bytes,
        config.fetch_ahead_windows,
        leased_bytes=int(pool_bytes * config.leased_share),
        timeout_s=config.tier_timeout_s,
    )


def _shared_memory(config: StoreConfig) -> SharedMemory:
    if not config.share_memory:
        return "off"
    return "require" if config.require_shared_memory else "auto"


def _identity(listen: str) -> str:
    """What tells a store from others on the machine; port 0 is another port for each."""
    return f"{listen}#{secrets.token_hex(8)}" if listen.endswith(":0") else listen


def _scoped(namespace: bytes, caller: Principal) -> bytes:
    """Where the store keeps what a caller calls `namespace`."""
    if len(namespace) != NAMESPACE_BYTES:
        raise InvalidRequest(f"namespace has {len(namespace)} bytes, wanted {NAMESPACE_BYTES}")
    return caller.scoped(namespace)


def _run(run: Run) -> pb.Run:
    return pb.Run(
        kind=pb.Kind.ValueType(run.kind),
        tier=pb.TIER_CPU if run.in_cpu else pb.TIER_REDIS,
        provenance=pb.Provenance.ValueType(run.provenance),
        first_token=run.first_token,
        end_token=run.end_token,
        tail_figures=run.tail_figures,
    )


def _checkpoint(record: Record) -> pb.Checkpoint:
    return pb.Checkpoint(
        token=record.end_token,
        tier=pb.TIER_CPU if record.in_cpu else pb.TIER_REDIS,
        provenance=pb.Provenance.ValueType(record.provenance),
        size_bytes=record.size,
        prefix_hash=record.name.prefix_hash,
    )
