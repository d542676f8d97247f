"""Whose namespaces are whose, what each tenant has stored, and what it may.

A tenant is known by a digest; the empty one stands for what has come without a tenant. It only
counts and decides; the catalog acts.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tailreplay.store.errors import GeometryMismatch, InvalidRequest
from tailreplay.store.evictor import Evictor
from tailreplay.store.namespace import TENANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tailreplay.store.record import Record

TierName = Literal["cpu", "redis"]

_TIERS: tuple[TierName, ...] = ("cpu", "redis")

NO_TENANT = b""
"""Owner of namespaces that were stored without one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes of a tenant by tier; None = as many as there is room for."""

    cpu_bytes: int | None = None
    redis_bytes: int | None = None

    def of(self, tier: TierName) -> int | None:
        """The limit of one tier."""
        return self.cpu_bytes if tier == "cpu" else self.redis_bytes


NO_LIMITS = Limits()


@dataclass(slots=True)
class _Account:
    """A tenant with limits, and the order in which its objects would go."""

    limits: Limits
    order: dict[TierName, Evictor] = field(
        default_factory=lambda: {"cpu": Evictor(), "redis": Evictor()}
    )


class Quotas:
    """Use and limits of all tenants. Thread-safe; its lock is taken under the catalog's."""

    def __init__(self) -> None:
        # Guarded by _lock: everything below.
        self._lock = threading.RLock()
        self._owner: dict[bytes, bytes] = {}
        self._fresh: set[bytes] = set()
        self._stale: set[bytes] = set()
        # Whose namespaces were until they were erased: an object that was on its way is theirs.
        self._former: dict[bytes, bytes] = {}
        self._long_former: dict[bytes, bytes] = {}
        self._accounts: dict[bytes, _Account] = {}
        self._bytes: Counter[tuple[TierName, bytes]] = Counter()
        self._evicted: Counter[bytes] = Counter()
        self._refused: Counter[bytes] = Counter()
        self._modes: dict[bytes, str] = {}

    def own(self, namespace: bytes, tenant: bytes) -> None:
        """Notes whose a namespace is; the first who names a tenant says it.

        Raises:
            InvalidRequest: the digest has another size than a tenant's.
            GeometryMismatch: the namespace is another tenant's.
        """
        if len(tenant) not in (0, TENANT_BYTES):
            raise InvalidRequest(f"tenant has {len(tenant)} bytes, wanted {TENANT_BYTES} or none")
        with self._lock:
            known = self._owner.get(namespace, NO_TENANT)
            self._fresh.add(namespace)
            if known in (NO_TENANT, tenant) or not tenant:
                self._assign(namespace, tenant or known)
                return
        raise GeometryMismatch(f"tenant is {tenant.hex()}, its namespace belongs to another")

    def learn(self, namespace: bytes, tenant: bytes) -> None:
        """Notes what another store has noted; what this one knows counts more."""
        with self._lock:
            self._assign(namespace, self._owner.get(namespace) or tenant)

    def unknown(self, namespaces: Iterable[bytes]) -> list[bytes]:
        """Those of which nobody has named a tenant yet; another store may do so any time."""
        with self._lock:
            return [space for space in namespaces if not self._owner.get(space)]

    def sweep(self, listed: Collection[bytes]) -> None:
        """Forgets owners of namespaces that are not listed, and were not since the last sweep."""
        with self._lock:
            for namespace in self._owner.keys() - listed - self._fresh:
                del self._owner[namespace]
            self._fresh.clear()
            self._long_former, self._former = self._former, {}

    def take_stale(self) -> list[bytes]:
        """Limited tenants that were found to own more since the last call; limit them again."""
        with self._lock:
            stale, self._stale = self._stale, set()
            return [tenant for tenant in stale if tenant in self._accounts]

    def disown(self, namespaces: Iterable[bytes]) -> None:
        """Forgets whose namespaces these are, but for those that have something, or get it soon."""
        with self._lock:
            for namespace in namespaces:
                if self._has_any(namespace):
                    continue
                if tenant := self._owner.pop(namespace, NO_TENANT):
                    self._former[namespace] = tenant

    def owner(self, namespace: bytes) -> bytes:
        """The tenant whose namespace it is."""
        return self._owner.get(namespace, NO_TENANT)

    def owners(self) -> dict[bytes, bytes]:
        """The tenant of every namespace that is known to have one."""
        with self._lock:
            return {space: tenant for space, tenant in self._owner.items() if tenant}

    def namespaces(self, tenant: bytes) -> list[bytes]:
        """A tenant's namespaces."""
        with self._lock:
            return [space for space, owner in self._owner.items() if owner == tenant]

    def tenants(self) -> list[bytes]:
        """Every tenant that owns a namespace, has limits or a mode."""
        with self._lock:
            return sorted({*self._owner.values(), *self._accounts, *self._modes})

    def placed(self, record: Record, tier: TierName, *, here: bool) -> None:
        """Notes that an object has come to a tier, or has left it."""
        space = record.name.namespace
        with self._lock:
            if here and (self._former or self._long_former) and not self._owner.get(space):
                self._own_again(space)
            left = self._bytes[tier, space] + (record.size if here else -record.size)
            if left:
                self._bytes[tier, space] = left
            else:
                del self._bytes[tier, space]
            account = self._account(space)
            if account is not None and here:
                account.order[tier].use([record])
            elif account is not None:
                account.order[tier].forget(record)

    def used(self, records: Sequence[Record]) -> None:
        """Notes that objects of one prefix were used."""
        if not self._accounts or not records:
            return
        with self._lock:
            account = self._account(records[0].name.namespace)
            if account is not None:
                account.order["cpu"].use(r for r in records if r.in_cpu)
                account.order["redis"].use(r for r in records if r.in_redis)

    def demoted(self, record: Record) -> None:
        """Notes that an object has little worth now."""
        with self._lock:
            account = self._account(record.name.namespace)
            for order in account.order.values() if account is not None else ():
                order.demote(record)

    def bytes_of(self, tenant: bytes, tier: TierName) -> int:
        """What a tenant has in a tier."""
        with self._lock:
            return sum(self._bytes[tier, space] for space in self.namespaces(tenant))

    def limits(self, tenant: bytes) -> Limits:
        """A tenant's limits."""
        account = self._accounts.get(tenant)
        return account.limits if account is not None else NO_LIMITS

    def limited(self) -> dict[bytes, Limits]:
        """Every tenant that has limits."""
        with self._lock:
            return {tenant: account.limits for tenant, account in self._accounts.items()}

    def limit(self, tenant: bytes, limits: Limits, records: Iterable[Record]) -> None:
        """Sets a tenant's limits.

        Args:
            tenant: whose.
            limits: what holds from now on; without any, the tenant is limited no more.
            records: all of the tenant's, in the order in which they would go.
        """
        with self._lock:
            self._accounts.pop(tenant, None)
            if limits == NO_LIMITS:
                return
            account = self._accounts[tenant] = _Account(limits)
            for record in records:
                account.order["cpu"].use([record] if record.in_cpu else [])
                account.order["redis"].use([record] if record.in_redis else [])

    def over(self, tenant: bytes, tier: TierName, more_bytes: int = 0) -> int:
        """Bytes by which a tenant would be over its limit with `more_bytes` more; at least 0."""
        limit = self.limits(tenant).of(tier)
        if limit is None:
            return 0
        return max(0, self.bytes_of(tenant, tier) + more_bytes - limit)

    def victims(
        self, tenant: bytes, tier: TierName, wanted_bytes: int, spare: Callable[[Record], bool]
    ) -> list[Record]:
        """As `Evictor.victims`, of one tenant's objects in one tier."""
        with self._lock:
            account = self._accounts.get(tenant)
            return account.order[tier].victims(wanted_bytes, spare=spare) if account else []

    def evicted(self, tenant: bytes, size: int) -> None:
        """Counts bytes that a tenant's own limit has made go."""
        with self._lock:
            self._evicted[tenant] += size

    def refused(self, tenant: bytes) -> None:
        """Counts an object that a tenant's limit has kept out."""
        with self._lock:
            self._refused[tenant] += 1

    def counts(self, tenant: bytes) -> tuple[int, int]:
        """Bytes evicted and objects refused by a tenant's limits, since the start."""
        with self._lock:
            return self._evicted[tenant], self._refused[tenant]

    def set_mode(self, tenant: bytes, mode: str) -> None:
        """Sets the mode that engines use when nobody else says one; empty takes it back."""
        with self._lock:
            if mode:
                self._modes[tenant] = mode
            else:
                self._modes.pop(tenant, None)

    def set_modes(self, modes: dict[bytes, str]) -> None:
        """Sets all modes at once; tenants that are not named have none."""
        with self._lock:
            self._modes = dict(modes)

    def modes(self) -> dict[bytes, str]:
        """The modes that are set, by tenant."""
        with self._lock:
            return dict(self._modes)

    def mode(self, tenant: bytes) -> str:
        """The mode set for a tenant, or nothing."""
        return self._modes.get(tenant, "")

    def _own_again(self, namespace: bytes) -> None:
        former = self._former.get(namespace) or self._long_former.get(namespace)
        if former:
            self._assign(namespace, former)

    def _assign(self, namespace: bytes, tenant: bytes) -> None:
        if self._owner.get(namespace) == tenant:
            return
        self._owner[namespace] = tenant
        if self._has_any(namespace):
            self._stale.add(tenant)

    def _has_any(self, namespace: bytes) -> bool:
        return any(self._bytes[tier, namespace] for tier in _TIERS)

    def _account(self, namespace: bytes) -> _Account | None:
        return self._accounts.get(self.owner(namespace)) if self._accounts else None
