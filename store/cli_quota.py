"""Commands about tenants: quotas, and the mode in which they are served."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import fail, misused, note, plain, size_of
from tailreplay.store.cli_tenant import Digest, Tenant, is_known, tenant_of, unknown

app = typer.Typer()
quota = typer.Typer(no_args_is_help=True, help="How much each tenant may store.")
mode = typer.Typer(no_args_is_help=True, help="How hits are used where nobody else says it.")
app.add_typer(quota, name="quota")
app.add_typer(mode, name="mode")


class ModeName(StrEnum):
    """What `mode set` takes."""

    EXACT = "exact"
    TAIL = "tail"
    AUTO = "auto"
    OFF = "off"
    UNSET = "unset"


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
        misused("no limit is given, wanted --cpu or --redis")
    request = pb.SetQuotaRequest(
        tenant=tenant_of(tenant, digest),
        cpu_bytes=None if cpu is None else size_of("--cpu", cpu),
        redis_bytes=None if redis is None else size_of("--redis", redis),
    )
    answer = asked.admin("SetQuota", request)
    asked.write(plain(answer), cli_tables.facts)
    _note_unknown(answer)


@command(quota, "get", operators=True)
def get_quota(
    asked: Asked,
    tenant: Tenant,
    digest: Digest = False,
) -> None:
    """What a tenant uses, and may; code 1 where the store knows no such tenant."""
    (answer,) = _listed(asked, tenant_of(tenant, digest)).tenants
    asked.write(plain(answer), cli_tables.facts)
    if not is_known(answer):
        fail(unknown(answer.tenant))


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
    """Take a tenant's limits away; code 1 where the store knows no such tenant."""
    request = pb.DeleteQuotaRequest(tenant=tenant_of(tenant, digest))
    (before,) = _listed(asked, request.tenant).tenants
    answer = asked.admin("DeleteQuota", request)
    asked.write(plain(answer), cli_tables.facts)
    if not is_known(before):
        fail(unknown(request.tenant))


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
    (answer,) = _listed(asked, request.tenant).tenants
    asked.write(plain(answer), cli_tables.facts)
    _note_unknown(answer)


def _listed(asked: Asked, tenant: bytes = b"") -> pb.ListTenantsResponse:
    answer: pb.ListTenantsResponse = asked.admin(
        "ListTenants", pb.ListTenantsRequest(tenant=tenant)
    )
    return answer


def _note_unknown(tenant: pb.TenantInfo) -> None:
    """Says that nothing of a tenant was ever stored: it may be a name that was typed wrong."""
    if not tenant.namespaces:
        note("nothing of this tenant is stored as yet; its name is what engines call `tenant`")
