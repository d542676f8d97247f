"""`tailreplay-store`: run a store, and look inside one.

Starts without torch and lmcache; only `serve` loads them. What needs an engine runs in a child
process.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from tailreplay.store import (
    cli_doctor,
    cli_look,
    cli_objects,
    cli_operate,
    cli_public,
    cli_quota,
    cli_serve,
    cli_size,
    cli_token,
    cli_top,
)
from tailreplay.store.cli_io import CREDENTIALS, Format, complaints, fail, misused
from tailreplay.store.credentials import Credentials
from tailreplay.store.extras import require
from tailreplay.store.wanted import wanted


class _Commands(TyperGroup):
    """All commands; says of a wrong value what it is, and what was wanted."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's, under a private name
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                item = error.__cause__.errors(include_url=False)[0]
                said = wanted(item)
                is_ours = said.startswith("wanted")
                error.message = f"{item['input']!r}, {said}" if is_ours else said
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A prefix cache for hybrid LLMs: run a store, and look inside one.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("tailreplay"))
        raise typer.Exit


@app.callback()
def _options(
    ca: Annotated[
        Path | None,
        typer.Option(help="PEM: CA of the store's certificate", envvar="TAILREPLAY_CLIENT_CA"),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(help="PEM: your certificate", envvar="TAILREPLAY_CLIENT_CERT"),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="PEM: its private key", envvar="TAILREPLAY_CLIENT_KEY")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="file with your token", envvar="TAILREPLAY_CLIENT_TOKEN_FILE"),
    ] = None,
    _: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """A prefix cache for hybrid LLMs: run a store, and look inside one."""
    try:
        CREDENTIALS.set(Credentials(ca=ca, cert=cert, key=key, token_file=token_file))
    except ValidationError as error:
        misused(complaints(error))


@app.command()
def demo(
    output_format: Annotated[
        Format, typer.Option("--format", help="how to write what was measured")
    ] = Format.TERMINAL,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object: the same as --format json")
    ] = False,
) -> None:
    """Two engines share one store: tokens reused, time to the first token, exactness."""
    try:
        require("demo", "store", "hf")
    except ImportError as error:
        fail(str(error))
    kind = Format.JSON if as_json else output_format
    command = [sys.executable, "-P", "-m", "tailreplay.connector.demo", "--format", kind.value]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


for group in (
    cli_serve,
    cli_look,
    cli_objects,
    cli_operate,
    cli_quota,
    cli_public,
    cli_size,
    cli_top,
    cli_doctor,
    cli_token,
):
    app.add_typer(group.app)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
