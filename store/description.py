"""What a store says of itself: Stats and Describe."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.auth import ADMINISTRATOR, Role
from tailreplay.store.objects import Kind
from tailreplay.store.tier_bytes import TIERS

if TYPE_CHECKING:
    from tailreplay.store.auth import Principal
    from tailreplay.store.core import Store


def stats_of(store: Store) -> pb.StatsResponse:
    """Counters and sizes, as of now."""
    figures = store.catalog.figures()
    redis = store.tiers.redis_status()
    fields = set(pb.StatsResponse.DESCRIPTOR.fields_by_name)
    known: dict[str, Any] = {k: value for k, value in figures.items() if k in fields}
    known["integrity_errors"] = figures.get("integrity_errors", 0) + int(
        redis.get("integrity_errors", 0)
    )
    return pb.StatsResponse(
        **known,
        tiers=[
            pb.TierBytes(tier=TIERS[tier], kind=pb.Kind.ValueType(kind), objects=n, bytes=size)
            for (tier, kind), (n, size) in sorted(store.catalog.tier_figures().items())
        ],
        pool_bytes=store.tiers.pool_bytes,
        pool_used_bytes=store.tiers.used_bytes,
        pinned_bytes=store.tiers.pinned_bytes,
        leases=len(store.leases),
        redis_healthy=bool(redis.get("healthy", False)),
        shared_memory=bool(store.tiers.shm_path),
    )


def description_of(store: Store, caller: Principal) -> pb.DescribeResponse:
    """What a store is, and every setting in force; secrets are left out.

    Tenants see no settings, and of the namespaces their own alone, as they call them.
    """
    return pb.DescribeResponse(
        version=version("tailreplay"),
        boot_id=store.boot_id,
        started_at_s=store.started_at_s,
        settings=_settings(store) if caller.role in (Role.ANYONE, Role.ADMIN) else {},
        namespaces=_namespaces(store, caller),
    )


def _settings(store: Store) -> dict[str, str]:
    config, tiers = store.config, store.tiers
    return config.in_words() | {
        "effective_pool_bytes": str(tiers.pool_bytes),
        "effective_digests": "keyed" if config.digest_key_file else "unkeyed: no digest_key_file",
        "effective_shared_memory": tiers.shm_path or "off: engines get copies",
    }


def _namespaces(store: Store, caller: Principal) -> list[pb.NamespaceInfo]:
    spaces, is_tenant = [], caller.role is Role.TENANT
    # How much room there is for all is none of a tenant's business.
    pooled = {} if is_tenant else store.catalog.pooled()
    for namespace, (blocks, tokens, geometry) in store.catalog.namespaces().items():
        sent = store.client_names.sent(namespace)
        if not _may_see(namespace, sent, caller):
            continue
        per_row = {kind: g.payload_bytes(1) for kind, g in geometry.items()}
        spaces.append(
            pb.NamespaceInfo(
                namespace=sent if is_tenant else namespace,
                sent_namespace=sent,
                is_public=_is_public(store, namespace, sent),
                tenant=store.catalog.quotas.owner(namespace),
                blocks=blocks,
                tokens=tokens,
                kv_bytes_per_token=per_row.get(Kind.KV, 0),
                hidden_bytes_per_token=per_row.get(Kind.HIDDEN, 0),
                checkpoint_bytes=per_row.get(Kind.CHECKPOINT, 0),
                capacity_tokens=_capacity(store.tiers.pool_bytes, *pooled.get(namespace, (0, 0))),
            )
        )
    return spaces


def _may_see(namespace: bytes, sent: bytes, caller: Principal) -> bool:
    if caller.role in (Role.ANYONE, Role.ADMIN):
        return True
    return caller.role is Role.TENANT and caller.scoped(sent) == namespace


def _is_public(store: Store, namespace: bytes, sent: bytes) -> bool:
    return store.catalog.public.has_any(namespace) or ADMINISTRATOR.scoped(sent) == namespace


def _capacity(pool_bytes: int, tokens: int, taken_bytes: int) -> int:
    """Tokens that a pool holds if so many take so many bytes."""
    return pool_bytes * tokens // taken_bytes if taken_bytes else 0
