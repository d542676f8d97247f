"""`tailreplay-store`: run a store, and look inside one.

Starts without torch and lmcache; only `serve` loads them. What needs an engine runs in a child
process.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from tailreplay.store import (
    cli_doctor,
    cli_look,
    cli_objects,
    cli_operate,
    cli_public,
    cli_quota,
    cli_size,
    cli_tables,
    cli_token,
    cli_top,
)
from tailreplay.store.cli_io import CREDENTIALS, fail
from tailreplay.store.credentials import Credentials
from tailreplay.store.errors import TailReplayError

app = typer.Typer(
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
        fail("; ".join(item["msg"] for item in error.errors(include_url=False)))


@app.command()
def serve(
    listen: Annotated[
        str | None, typer.Option(help="unix:///path/to.sock or host:port", show_default=False)
    ] = None,
    pool_bytes: Annotated[
        int | None, typer.Option(help="size of the CPU tier, bytes", show_default=False)
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="redis://host:port, rediss://host:port (TLS) or unix:///path; several with "
            "blanks between",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with settings", show_default=False)
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="list every setting and end")
    ] = False,
) -> None:
    """Run a store until SIGTERM or Ctrl-C. Flags over TAILREPLAY_* over file over defaults."""
    from tailreplay.store.serving import serve_until_stopped, settings_in_words

    if settings:
        for item in settings_in_words():
            cli_tables.facts(Console(highlight=False), item)
            typer.echo()
        return

    flags = {"listen": listen, "pool_bytes": pool_bytes, "redis_url": redis_url}
    try:
        serve_until_stopped({k: v for k, v in flags.items() if v is not None}, config)
    except (TailReplayError, ValueError) as error:
        fail(str(error))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Two engines share one store: tokens reused, time to the first token, exactness.

    With --format json (or --json) it prints one JSON object.
    """
    command = [sys.executable, "-P", "-m", "tailreplay.connector.demo", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


for group in (
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
