"""Commands that change what a store holds: unpin, clear, purge, erase."""

from __future__ import annotations

from typing import Annotated

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_io import (
    ADMIN_TIMEOUT_S,
    AdminUrl,
    Format,
    FormatOption,
    Output,
    Quiet,
    Url,
    ask_admin,
    fail,
    namespace_of,
    plain,
    write,
)
from tailreplay.store.cli_quota import Digest, Tenant, tenant_of
from tailreplay.store.errors import InvalidRequest

app = typer.Typer()
kvcache = typer.Typer(no_args_is_help=True, help="What all engines have stored.")
app.add_typer(kvcache, name="kvcache")


@app.command()
def pins(
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """The pins there are."""
    answer = ask_admin(
        url, admin_url, lambda stub: stub.ListPins(pb.ListPinsRequest(), timeout=ADMIN_TIMEOUT_S)
    )
    write(plain(answer), cli_tables.pins, output_format, output, quiet)


@app.command()
def unpin(
    pin_id: Annotated[str, typer.Argument(help="as `pin` and `pins` show it")],
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """End a pin; code 1 when there is none of that id."""
    try:
        request = pb.UnpinRequest(pin_id=bytes.fromhex(pin_id))
    except ValueError:
        fail(f"pin_id is {pin_id!r}, wanted hex digits (see `pins`)")
    answer = ask_admin(url, admin_url, lambda stub: stub.Unpin(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.facts, output_format, output, quiet)
    if not answer.was_there:
        raise typer.Exit(1)


@kvcache.command()
def clear(
    everything: Annotated[bool, typer.Option("--all", help="all of it")] = False,
    namespace: Annotated[str, typer.Option(help="of one namespace, in hex")] = "",
    tenant: Annotated[str, typer.Option(help="of one tenant, by name")] = "",
    digest: Digest = False,
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Forget stored objects, in both tiers: --all, --namespace or --tenant."""
    if sum((everything, bool(namespace), bool(tenant))) != 1:
        fail("what to clear is not clear, wanted one of --all, --namespace and --tenant")
    if everything:
        request = pb.ClearRequest(everything=True)
    elif namespace:
        request = pb.ClearRequest(namespace=_namespace(namespace, url))
    else:
        request = pb.ClearRequest(tenant=tenant_of(tenant, digest))
    answer = ask_admin(url, admin_url, lambda stub: stub.Clear(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.removed, output_format, output, quiet)


@app.command()
def purge(
    namespace: Annotated[str, typer.Option(help="namespace, in hex (see `describe`)")],
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Forget a namespace in both tiers, such as that of a model that is not served any more."""
    request = pb.ClearRequest(namespace=_namespace(namespace, url))
    answer = ask_admin(url, admin_url, lambda stub: stub.Clear(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.removed, output_format, output, quiet)


@app.command()
def erase(
    tenant: Tenant,
    digest: Digest = False,
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Erase a tenant in all tiers, and count what is left; code 1 unless that is nothing."""
    request = pb.EraseRequest(tenant=tenant_of(tenant, digest))
    answer = ask_admin(url, admin_url, lambda stub: stub.Erase(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.removed, output_format, output, quiet)
    if answer.cpu_objects_left or answer.redis_keys_left or answer.held_objects:
        raise typer.Exit(1)


def _namespace(namespace: str, url: str) -> bytes:
    try:
        return namespace_of(namespace, url)
    except InvalidRequest as error:
        fail(str(error))
