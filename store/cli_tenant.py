"""How commands are told whose objects they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tailreplay.store.cli_io import from_hex, misused
from tailreplay.store.namespace import TENANT_BYTES, tenant_digest

if TYPE_CHECKING:
    from tailreplay.proto import store_pb2 as pb

Tenant = Annotated[str, typer.Argument(help="the tenant's name, as its engines have it")]
Digest = Annotated[
    bool, typer.Option("--digest", help="the tenant is given as `quota list` shows it, in hex")
]
OfTenant = Annotated[
    str, typer.Option("--tenant", help="tenant, by name, whose the only namespace is that is meant")
]


def tenant_of(name: str, digest: bool) -> bytes:
    """A tenant's digest, from its name, or from the digest in hex; ends the command if wrong."""
    if not name:
        misused("tenant is empty, wanted its name")
    if not digest:
        return tenant_digest(name)
    return from_hex("tenant", name, "quota list", TENANT_BYTES)


def tenant_or_any(name: str, digest: bool) -> bytes:
    """As `tenant_of`; nothing where none is given."""
    return tenant_of(name, digest) if name or digest else b""


def is_known(tenant: pb.TenantInfo) -> bool:
    """Whether a store knows anything of a tenant: what is its own, or was decided for it."""
    limited = tenant.HasField("cpu_limit_bytes") or tenant.HasField("redis_limit_bytes")
    counted = (tenant.namespaces, tenant.cpu_bytes, tenant.redis_bytes)
    return limited or any(counted) or bool(tenant.default_mode)


def unknown(tenant: bytes) -> str:
    """What to say of a tenant that a store does not know."""
    return (
        f"this store knows no such tenant ({tenant.hex()}), wanted one that `quota list` shows, by "
        "the name that its engines have"
    )
