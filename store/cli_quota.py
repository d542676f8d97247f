"""Commands about tenants: quotas, and the mode in which they are served."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import fail, from_hex, plain, size_of
from tailreplay.store.namespace import TENANT_BYTES, tenant_digest

app = typer.Typer()
quota = typer.Typer(no_args_is_help=True, help="How much each tenant may store.")
mode = typer.Typer(no_args_is_help=True, help="How hits are used where nobody else says it.")
app.add_typer(quota, name="quota")
app.add_typer(mode, name="mode")

Tenant = Annotated[str, typer.Argument(help="the tenant's name, as its engines have it")]
Digest = Annotated[
    bool, typer.Option("--digest", help="the tenant is given as `quota list` shows it, in hex")
]


class ModeName(StrEnum):
    """What `mode set` takes."""

    EXACT = "exact"
    TAIL = "tail"
    AUTO = "auto"
    OFF = "off"
    UNSET = "unset"


def tenant_of(name: str, digest: bool) -> bytes:
    """A tenant's digest, from its name, or from the digest in hex; ends the command if wrong."""
    if not name:
        fail("tenant is empty, wanted its name")
    if not digest:
        return tenant_digest(name)
    return from_hex("tenant", name, "quota list", TENANT_BYTES)


@command(quota, "set", operators=True)
def set_quota(
    asked: Asked,
    tenant: Tenant,
    cpu: Annotated[
        str | None, typer.Option(help="most in the CPU tier, such as 512MiB", show_default=False)
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="most in Redis, such as 20GiB", show_default=False)
    ] = None,
    digest: Digest = False,
) -> None:
    """Limit a tenant; what is over goes at once, its own oldest objects first."""
    if cpu is None and redis is None:
        fail("no limit is given, wanted --cpu or --redis")
    request = pb.SetQuotaRequest(
        tenant=tenant_of(tenant, digest),
        cpu_bytes=None if cpu is None else size_of("--cpu", cpu),
        redis_bytes=None if redis is None else size_of("--redis", redis),
    )
    answer = asked.admin("SetQuota", request)
    asked.write(plain(answer), cli_tables.facts)


@command(quota, "get", operators=True)
def get_quota(
    asked: Asked,
    tenant: Tenant,
    digest: Digest = False,
) -> None:
    """What a tenant uses, and may."""
    answer = _listed(asked, tenant_of(tenant, digest))
    asked.write(plain(answer.tenants[0]), cli_tables.facts)


@command(quota, "list", operators=True)
def list_quotas(asked: Asked) -> None:
    """What every tenant uses, and may; names are not known to a store."""
    answer = _listed(asked)
    asked.write(plain(answer), cli_tables.tenants)


@command(quota, "delete", operators=True)
def delete_quota(
    asked: Asked,
    tenant: Tenant,
    digest: Digest = False,
) -> None:
    """Take a tenant's limits away."""
    request = pb.DeleteQuotaRequest(tenant=tenant_of(tenant, digest))
    answer = asked.admin("DeleteQuota", request)
    asked.write(plain(answer), cli_tables.facts)


@command(mode, "set", operators=True)
def set_mode(
    asked: Asked,
    tenant: Tenant,
    wanted: Annotated[ModeName, typer.Argument(help="unset takes it back")],
    digest: Digest = False,
) -> None:
    """The mode of a tenant's requests where neither they nor their engine name one.

    vLLM engines always name one. `tail` and `auto` may make answers approximate.
    """
    name = "" if wanted is ModeName.UNSET else wanted.value
    request = pb.SetModeRequest(tenant=tenant_of(tenant, digest), mode=name)
    asked.admin("SetMode", request)
    answer = _listed(asked, request.tenant)
    asked.write(plain(answer.tenants[0]), cli_tables.facts)


def _listed(asked: Asked, tenant: bytes = b"") -> pb.ListTenantsResponse:
    answer: pb.ListTenantsResponse = asked.admin(
        "ListTenants", pb.ListTenantsRequest(tenant=tenant)
    )
    return answer
