"""Commands that change what a store holds: unpin, clear, purge, erase."""

from __future__ import annotations

from typing import Annotated

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import fail, from_hex, is_left, misused, plain
from tailreplay.store.cli_tenant import Digest, Tenant, is_known, tenant_of, unknown

app = typer.Typer()

_PIN_ID_BYTES = 16
kvcache = typer.Typer(no_args_is_help=True, help="What all engines have stored.")
app.add_typer(kvcache, name="kvcache")


@command(app, operators=True)
def pins(asked: Asked) -> None:
    """The pins there are."""
    answer = asked.admin("ListPins", pb.ListPinsRequest())
    asked.write(plain(answer), cli_tables.pins)


@command(app, operators=True)
def unpin(
    asked: Asked,
    pin_id: Annotated[str, typer.Argument(help="as `pin` and `pins` show it")],
) -> None:
    """End a pin; code 1 when there is none of that id."""
    request = pb.UnpinRequest(pin_id=from_hex("pin_id", pin_id, "pins", _PIN_ID_BYTES))
    answer = asked.admin("Unpin", request)
    asked.write(plain(answer), cli_tables.facts)
    if not answer.was_there:
        fail(f"there is no pin {pin_id}")


@command(kvcache, operators=True)
def clear(
    asked: Asked,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="all of it, at all stores of the same Redis; does not ask before it does"
        ),
    ] = False,
    namespace: Annotated[str, typer.Option(help="of one namespace, in hex")] = "",
    tenant: Annotated[str, typer.Option(help="of one tenant, by name")] = "",
    digest: Digest = False,
) -> None:
    """Forget stored objects, in Redis and all its stores: --all, --namespace or --tenant."""
    if sum((everything, bool(namespace), bool(tenant))) != 1:
        misused("what to clear is not clear, wanted one of --all, --namespace and --tenant")
    if everything:
        request = pb.ClearRequest(everything=True)
    elif namespace:
        request = pb.ClearRequest(namespace=asked.namespace(namespace))
    else:
        request = pb.ClearRequest(tenant=tenant_of(tenant, digest))
    if _clear(asked, request) == 0 and request.tenant and not _knows(asked, request.tenant):
        fail(unknown(request.tenant))


@command(app, operators=True)
def purge(
    asked: Asked,
    namespace: Annotated[str, typer.Option(help="namespace, in hex (see `describe`)")],
) -> None:
    """Forget a namespace in Redis and all its stores, as of a model that is served no more."""
    _clear(asked, pb.ClearRequest(namespace=asked.namespace(namespace)))


@command(app, operators=True)
def erase(
    asked: Asked,
    tenant: Tenant,
    digest: Digest = False,
) -> None:
    """Erase a tenant in all tiers, and count what is left; code 1 unless that is nothing.

    Code 1 as well where no namespace of the tenant is known, so that nothing is proved.
    """
    request = pb.EraseRequest(tenant=tenant_of(tenant, digest))
    answer = asked.admin("Erase", request)
    asked.write(plain(answer), cli_tables.removed)
    if is_left(answer):
        fail("not all is erased, or a store did not say so: erase again")
    elif answer.unlisted_bulk_tiers:
        fail("a bulk tier can not be listed: what it has beyond the index is unproven")
    elif not answer.namespaces:
        fail(
            "no namespace of this tenant is known: nothing was erased, and nothing is proved; "
            "wanted a tenant that `quota list` shows, by the name that its engines have"
        )


def _knows(asked: Asked, tenant: bytes) -> bool:
    answer = asked.admin("ListTenants", pb.ListTenantsRequest(tenant=tenant))
    return any(map(is_known, answer.tenants))


def _clear(asked: Asked, request: pb.ClearRequest) -> int:
    """Clears, shows what has gone, and counts it; code 1 if a store did not say that it has."""
    answer = asked.admin("Clear", request)
    asked.write(plain(answer), cli_tables.removed)
    if answer.silent_stores:
        fail(f"stores that did not say that they have cleared: {answer.silent_stores}")
    return sum(place.objects for place in answer.removed)
