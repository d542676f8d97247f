"""`token`: makes one; its digest goes into a store's file, itself into one of its bearer's."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from tailreplay.store.auth import TENANT_NAME, Role, TokenEntry, TokenFile, token_faults
from tailreplay.store.cli_io import fail, misused

app = typer.Typer()

_TOKEN_BYTES = 32
_ROLES = (Role.TENANT, Role.ADMIN, Role.METRICS)


@app.command()
def token(
    token_file: Annotated[Path, typer.Argument(help="the store's token file; made if need be")],
    bearer: Annotated[Path, typer.Argument(help="new file that the token itself goes to")],
    tenant: Annotated[str, typer.Option(help="whose objects the bearer sees")] = "",
    role: Annotated[str, typer.Option(help="tenant, admin or metrics")] = "tenant",
    shared_memory: Annotated[
        bool,
        typer.Option("--shared-memory", help="the bearer may map the pool, all tenants' bytes"),
    ] = False,
) -> None:
    """Make a token. A running store takes it from its next call on."""
    _check(role, tenant)
    secret = secrets.token_hex(_TOKEN_BYTES)
    fields: dict[str, Any] = {"role": role, "tenant": tenant} if tenant else {"role": role}
    try:
        entry = TokenEntry(
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            shared_memory=shared_memory,
            **fields,
        )
        known = TokenFile.model_validate_json(token_file.read_bytes()).tokens
    except FileNotFoundError:
        known = ()
    except OSError as error:
        fail(f"{token_file} can not be read: {error.strerror}")
    except ValidationError as error:
        fail(f"token file {token_file}: {token_faults(error)}")
    try:
        _write(bearer, f"{secret}\n", os.O_EXCL)
        listed = TokenFile(tokens=(*known, entry)).model_dump_json(indent=2, exclude_defaults=True)
        fresh = token_file.with_name(f"{token_file.name}.{secrets.token_hex(4)}")
        _write(fresh, f"{listed}\n", os.O_EXCL)
        if token_file.exists():
            _give_alike(fresh, token_file)
        fresh.replace(token_file)
    except OSError as error:
        fail(f"{error.filename} can not be written: {error.strerror}")
    typer.echo(f"{bearer}: {tenant or role}, one of {len(known) + 1} tokens in {token_file}")


def _check(role: str, tenant: str) -> None:
    """Ends the command if it is wrong."""
    if role not in _ROLES:
        misused(f"--role is {role!r}, wanted one of {', '.join(_ROLES)}")
    if role != Role.TENANT and tenant:
        misused(f"--tenant is {tenant!r}, wanted none: a token of role {role} has no tenant")
    if role == Role.TENANT and not tenant:
        misused("--tenant is not given, wanted the tenant's name: role tenant is of one")
    if tenant and not re.fullmatch(TENANT_NAME, tenant):
        misused(f"--tenant is {tenant!r}, wanted 1 to 64 of letters, digits, `.`, `_` and `-`")


def _write(file: Path, text: str, flags: int) -> None:
    """Writes a file that its owner alone can read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _give_alike(file: Path, other: Path) -> None:
    """Gives a file the owner and the mode of another, so that the store can go on reading it."""
    stat = other.stat()
    os.chown(file, stat.st_uid, stat.st_gid)
    file.chmod(stat.st_mode & 0o777)
