"""What operators ask of a store, and what it does for them by itself."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, get_args

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import tokens as wire_tokens
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.ledger import WRITTEN_EVERY_S
from tailreplay.store.namespace import checked_namespace, checked_tenant
from tailreplay.store.objects import Kind
from tailreplay.store.operator_pins import OperatorPin, OperatorPins
from tailreplay.store.prompt import Prompt
from tailreplay.store.quota import NO_LIMITS, NO_TENANT, Limits, TierName
from tailreplay.store.tier_bytes import TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.ledger import Decisions, Ledger
    from tailreplay.store.record import Record
    from tailreplay.store.tiers import Tiers
    from tailreplay.store.views import Match, Path

logger = logging.getLogger(__name__)

MODES = ("exact", "tail", "auto", "off")
"""Modes that an operator can set; `zero` is for evaluation."""

_READ_AGAIN_S = 1.0
_SWEEP_S = 600.0
_MOST_ASKED = 1000


class Operators:
    """Pins, quotas and inspection of one store. Thread-safe.

    Args:
        catalog: what exists.
        tiers: where it is.
        ledger: keeps decisions over a restart, and tells other stores; None without Redis.
        pins: what operators keep in the CPU tier.
        digest_key: gives the key of the running digests for a namespace.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        ledger: Ledger | None,
        pins: OperatorPins,
        *,
        digest_key: Callable[[bytes], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._digest_key = digest_key
        self._quotas = catalog.quotas
        self._tiers = tiers
        self._ledger = ledger
        self._clock = clock
        self.pins = pins
        # Touched by `tick` alone: when Redis was last read, and owners swept, of how many
        # namespaces was asked, and the epoch of the server that has what was decided.
        self._read_at_s = -math.inf
        self._swept_at_s = clock()
        self._asked = 0
        self._epoch = b""
        # Guarded by _lock: owners that Redis was told, and until when that will do.
        self._lock = threading.Lock()
        self._written: dict[bytes, tuple[bytes, float]] = {}

    def pin(self, request: pb.PinRequest) -> pb.PinInfo:
        """Keeps a prefix in the CPU tier.

        Raises:
            InvalidRequest: namespace or tokens are malformed, nothing is stored, or no time given.
            LimitExceeded: pins hold as much as they may.
        """
        if not request.seconds > 0:
            raise InvalidRequest(f"seconds is {request.seconds}, wanted more than 0")
        found, path = self._find(request.namespace, request.tokens)
        if not found.matched_tokens:
            raise InvalidRequest("nothing is stored of this prefix, wanted at least one block")
        pin = self.pins.pin(
            request.namespace,
            found.matched_tokens,
            _by_worth(found, path),
            max_bytes=request.max_bytes,
            seconds=request.seconds,
        )
        logger.info("pinned %d bytes of a prefix for %.0f s", pin.held_bytes, request.seconds)
        return self._pin_info(pin)

    def unpin(self, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """Ends a pin."""
        return pb.UnpinResponse(was_there=self.pins.unpin(request.pin_id))

    def list_pins(self) -> pb.ListPinsResponse:
        """The pins there are."""
        return pb.ListPinsResponse(pins=[self._pin_info(pin) for pin in self.pins.all()])

    def set_quota(self, request: pb.SetQuotaRequest) -> pb.TenantInfo:
        """Limits a tenant, and makes what is over go.

        Raises:
            InvalidRequest: the tenant is malformed, no limit is given, or one for a Redis where
                there is none.
            StoreUnavailable: Redis does not take it; nothing has changed.
        """
        limits = Limits(
            request.cpu_bytes if request.HasField("cpu_bytes") else None,
            request.redis_bytes if request.HasField("redis_bytes") else None,
        )
        if limits == NO_LIMITS:
            raise InvalidRequest("a quota has no limit, wanted cpu_bytes or redis_bytes")
        if limits.redis_bytes is not None and self._ledger is None:
            raise InvalidRequest(
                f"redis_bytes is {limits.redis_bytes}, and this store has no Redis: wanted "
                "cpu_bytes alone (--cpu), or a store with redis_url"
            )
        return self._limit(checked_tenant(request.tenant), limits)

    def delete_quota(self, request: pb.DeleteQuotaRequest) -> pb.TenantInfo:
        """Takes a tenant's limits away.

        Raises:
            InvalidRequest: the tenant is malformed.
            StoreUnavailable: Redis does not take it; nothing has changed.
        """
        return self._limit(checked_tenant(request.tenant), NO_LIMITS)

    def list_tenants(self, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        """Use and limits of one tenant, or of all."""
        wanted = [checked_tenant(request.tenant)] if request.tenant else self._quotas.tenants()
        return pb.ListTenantsResponse(tenants=[self._tenant_info(tenant) for tenant in wanted])

    def set_mode(self, request: pb.SetModeRequest) -> pb.SetModeResponse:
        """Sets a tenant's mode; the empty tenant is everybody who names none.

        Raises:
            InvalidRequest: there is no such mode.
            StoreUnavailable: Redis does not take it; nothing has changed.
        """
        if request.mode not in ("", *MODES):
            raise InvalidRequest(f"mode is {request.mode!r}, wanted one of {', '.join(MODES)}")
        tenant = checked_tenant(request.tenant, or_none=True)
        if self._ledger is not None:
            self._ledger.set_mode(tenant, request.mode)
        self._quotas.set_mode(tenant, request.mode)
        logger.info("a tenant's default mode is now %r", request.mode)
        return pb.SetModeResponse()

    def inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        """Every object along the longest stored prefix.

        Raises:
            InvalidRequest: namespace or tokens are malformed.
        """
        found, path = self._find(request.namespace, request.tokens)
        return pb.InspectResponse(
            matched_tokens=found.matched_tokens,
            objects=[self._object_info(record) for record in _by_worth(found, path)],
            tenant=self._quotas.owner(request.namespace),
        )

    def tick(self) -> None:
        """Ends old pins, enforces quotas, and reads and writes what Redis keeps; called often."""
        self.pins.expire()
        for tenant, limits in self._quotas.limited().items():
            self._enforce(tenant, limits)
        if self._clock() - self._read_at_s < _READ_AGAIN_S:
            return
        self._read_at_s = self._clock()
        try:
            self._agree_on_owners(self._ledger)
            if self._ledger is not None:
                self._read_ledger(self._ledger)
        except StoreUnavailable as error:
            logger.debug("operators' data: %s", error)
        for tenant in self._quotas.take_stale():
            self._catalog.limit(tenant, self._quotas.limits(tenant))

    def close(self) -> None:
        """Says whose namespaces are whose as far as Redis was not told yet."""
        try:
            self._agree_on_owners(self._ledger)
        except StoreUnavailable as error:
            logger.debug("whose namespaces are was not said at the end: %s", error)

    def redis_lost(self) -> None:
        """Says anew whose namespaces are whose, since Redis may have forgotten it."""
        with self._lock:
            self._written.clear()

    def _find(self, namespace: bytes, tokens: pb.Tokens) -> tuple[Match, Path]:
        key = self._digest_key(checked_namespace(namespace))
        return self._catalog.peek(Prompt(namespace, wire_tokens.from_wire(tokens), key))

    def _limit(self, tenant: bytes, limits: Limits) -> pb.TenantInfo:
        if self._ledger is not None:
            self._ledger.set_limits(tenant, limits)
        self._catalog.limit(tenant, limits)
        self._enforce(tenant, limits)
        logger.info("a tenant's limits are now %s", limits)
        return self._tenant_info(tenant)

    def _enforce(self, tenant: bytes, limits: Limits) -> None:
        over = self._quotas.over(tenant, "cpu")
        if over:
            self._catalog.room.make(over, tenant)
        over = self._quotas.over(tenant, "redis") if limits.redis_bytes is not None else 0
        if over:
            victims = self._quotas.victims(tenant, "redis", over, lambda _: False)
            names = [record.name for record in victims]
            size = sum(record.size for record in victims)
            self._catalog.redis.gone(victims)
            self._tiers.delete_in_redis(names)
            self._quotas.evicted(tenant, size)

    def _agree_on_owners(self, ledger: Ledger | None) -> None:
        """Asks whose namespaces are, says whose they are, and forgets those that are gone."""
        spaces = self._catalog.spaces()
        if ledger is not None:
            unknown = self._next(self._quotas.unknown(spaces))
            found = ledger.owners_of(unknown) if unknown else {}
            for space in unknown:
                self._quotas.learn(space, found.get(space, NO_TENANT))
            owners, now_s = self._quotas.owners().items(), self._clock()
            with self._lock:
                written = {s: t for s, (t, until_s) in self._written.items() if now_s < until_s}
            news = {s: t for s, t in owners if s in spaces and written.get(s) != t}
            until_s = now_s + WRITTEN_EVERY_S
            # Noted before it is done, so that what is erased meanwhile is written again.
            with self._lock:
                kept = {s: said for s, said in self._written.items() if s in spaces}
                self._written = kept | {s: (t, until_s) for s, t in news.items()}
            self._own(ledger, news)
        if self._clock() - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = self._clock()
            self._quotas.sweep(spaces)

    def _own(self, ledger: Ledger, news: Mapping[bytes, bytes]) -> None:
        try:
            ledger.own(news)
            self._tiers.own(news)
        except BaseException:
            self._unwrite(news)
            raise
        # Or what was erased meanwhile would be said to be there.
        ledger.disown(space for space, t in news.items() if self._quotas.owner(space) != t)

    def _unwrite(self, namespaces: Iterable[bytes]) -> None:
        """Has it written again whose these are."""
        with self._lock:
            for namespace in namespaces:
                self._written.pop(namespace, None)

    def _next(self, unknown: list[bytes]) -> list[bytes]:
        """Those of them to ask for now; the others have their turn."""
        at = self._asked if self._asked < len(unknown) else 0
        self._asked = at + _MOST_ASKED
        return unknown[at : at + _MOST_ASKED]

    def disown(self, namespaces: Collection[bytes]) -> None:
        """Forgets whose namespaces these are, here and in Redis.

        Raises:
            StoreUnavailable: Redis does not take it; nothing has changed.
        """
        if self._ledger is not None:
            self._ledger.disown(namespaces)
        self._quotas.disown(namespaces)
        self._unwrite(namespaces)

    def _read_ledger(self, ledger: Ledger) -> None:
        found = ledger.decisions()
        if self._epoch and found.epoch != self._epoch:
            self._tell_again(ledger, found)
            return
        self._epoch = found.epoch
        limits, modes = found.limits, found.modes
        for tenant in {*limits, *self._quotas.limited()}:
            wanted = limits.get(tenant, NO_LIMITS)
            if wanted != self._quotas.limits(tenant):
                self._catalog.limit(tenant, wanted)
        self._quotas.set_modes(modes)

    def _tell_again(self, ledger: Ledger, found: Decisions) -> None:
        """Writes what was decided before Redis lost it, but for what is decided anew by now."""
        if not found.epoch:
            return  # it has just been lost: who sees it first sets another
        for tenant, limits in self._quotas.limited().items():
            if tenant not in found.limits:
                ledger.set_limits(tenant, limits)
        for tenant, mode in self._quotas.modes().items():
            if tenant not in found.modes:
                ledger.set_mode(tenant, mode)
        self._epoch = found.epoch
        logger.info("limits and modes were written to Redis again")

    def _pin_info(self, pin: OperatorPin) -> pb.PinInfo:
        return pb.PinInfo(
            pin_id=pin.pin_id,
            namespace=pin.namespace,
            tokens=pin.tokens,
            objects=len(pin.records),
            bytes=pin.held_bytes,
            left_out_bytes=pin.left_out_bytes,
            expires_in_s=self.pins.seconds_left(pin),
            pinned_tokens=_leading_tokens(pin.records),
        )

    def _tenant_info(self, tenant: bytes) -> pb.TenantInfo:
        limits = self._quotas.limits(tenant)
        evicted, refused = self._quotas.counts(tenant)
        return pb.TenantInfo(
            tenant=tenant,
            namespaces=len(self._quotas.namespaces(tenant)),
            cpu_bytes=self._quotas.bytes_of(tenant, "cpu"),
            redis_bytes=self._quotas.bytes_of(tenant, "redis"),
            cpu_limit_bytes=limits.cpu_bytes,
            redis_limit_bytes=limits.redis_bytes,
            evicted_bytes=evicted,
            refused_objects=refused,
            default_mode=self._quotas.mode(tenant),
        )

    def _object_info(self, record: Record) -> pb.ObjectInfo:
        idle_s = self._catalog.room.idle_s(record)
        return pb.ObjectInfo(
            kind=pb.Kind.ValueType(record.name.kind),
            first_token=record.first_token,
            end_token=record.end_token,
            size_bytes=record.size,
            provenance=pb.Provenance.ValueType(record.provenance),
            tiers=[
                TIERS[tier]
                for tier in get_args(TierName)
                if (record.in_cpu if tier == "cpu" else record.in_redis)
            ],
            pinned=self._catalog.room.is_kept(record),
            idle_s=idle_s,
            prefix_hash=record.name.prefix_hash,
        )


def _leading_tokens(records: Collection[Record]) -> int:
    """Tokens from the beginning on whose keys and values are among some objects."""
    end = 0
    for record in records:  # early keys and values come first
        if record.name.kind == Kind.KV and record.first_token == end:
            end = record.end_token
    return end


def _by_worth(found: Match, path: Path) -> list[Record]:
    """What exists of a prefix: keys and values, then states from the last on, then hiddens."""
    records = [*path.kv, *reversed(found.checkpoints), *path.hidden]
    return [r for r in records if r.exists and r.first_token < found.matched_tokens]
