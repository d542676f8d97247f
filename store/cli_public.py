"""`public`: prefixes of the public scope that are open to all tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import Namespace, fail, from_hex, is_left, misused, plain, read_prompt
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.tokens import extended_tokens, to_wire

app = typer.Typer()

_HASH_BYTES = 32
public = typer.Typer(no_args_is_help=True, help="What every tenant may read, as a system prompt.")
app.add_typer(public, name="public")

Hash = Annotated[str, typer.Argument(help="the prefix's hash, in hex, as `public list` shows it")]


@command(public, "add", operators=True)
def add(
    asked: Asked,
    prompt: Annotated[
        Path | None, typer.Argument(help="JSON array of token ids; - for standard input")
    ] = None,
    prefix_hash: Annotated[
        str, typer.Option("--hash", help="a stored prefix's hash, in hex (see `inspect`)")
    ] = "",
    namespace: Namespace = "",
) -> None:
    """Open a prefix to all tenants, in whole blocks of 256 tokens, stored or not yet."""
    if (prompt is None) == (not prefix_hash):
        misused("what to open is not clear, wanted a prompt or --hash")
    request = pb.AddPublicRequest()
    if prompt is not None:
        try:
            request.tokens.CopyFrom(to_wire(extended_tokens(read_prompt(prompt))))
        except InvalidRequest as error:
            fail(str(error))
    else:
        request.prefix_hash = from_hex("hash", prefix_hash, "public list", _HASH_BYTES)
    request.namespace = asked.public_namespace(namespace)
    asked.write(plain(asked.admin("AddPublic", request)), cli_tables.public_prefix)


@command(public, "list", operators=True)
def list_public(asked: Asked) -> None:
    """The prefixes that are open, and what is stored of them."""
    asked.write(plain(asked.admin("ListPublic", pb.ListPublicRequest())), cli_tables.public)


@command(public, "remove", operators=True)
def remove(asked: Asked, prefix_hash: Hash) -> None:
    """Close a prefix, erase it, and count what is left; code 1 unless that is nothing."""
    named = from_hex("hash", prefix_hash, "public list", _HASH_BYTES)
    answer: pb.RemovePublicResponse = asked.admin(
        "RemovePublic", pb.RemovePublicRequest(prefix_hash=named)
    )
    asked.write(plain(answer), cli_tables.removed)
    if is_left(answer):
        fail("not all is erased, or a store did not say so: remove it again")
    elif answer.unlisted_bulk_tiers:
        fail("a bulk tier can not be listed: what it has beyond the index is unproven")
