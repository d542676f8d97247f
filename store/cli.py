"""`tailreplay-store`: run a store, and look inside one.

Starts without torch and lmcache; only `serve` loads them. What needs an engine runs in a child
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError
from rich.console import Console

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import cli_tables
from tailreplay.store.address import checked_address
from tailreplay.store.config import default_socket
from tailreplay.store.credentials import NO_CREDENTIALS, Credentials
from tailreplay.store.errors import InvalidRequest, TailReplayError, from_rpc_error
from tailreplay.store.namespace import NAMESPACE_BYTES
from tailreplay.store.tokens import extended_tokens, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A prefix cache for hybrid LLMs: run a store, and look inside one.",
)


class Format(StrEnum):
    """How an answer is written."""

    TERMINAL = "terminal"
    JSON = "json"


Url = Annotated[
    str, typer.Option("--url", help="store address", envvar="TAILREPLAY_LISTEN", show_default=False)
]
FormatOption = Annotated[Format, typer.Option("--format", help="how to write the answer")]
Output = Annotated[
    Path | None, typer.Option("--output", help="write the answer to this file", show_default=False)
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="write nothing; the exit code tells")]
_TIMEOUT_S = 5.0
_CREDENTIALS = ContextVar("credentials", default=NO_CREDENTIALS)

T = TypeVar("T")


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
        _CREDENTIALS.set(Credentials(ca=ca, cert=cert, key=key, token_file=token_file))
    except ValidationError as error:
        _fail("; ".join(item["msg"] for item in error.errors(include_url=False)))


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
        typer.Option(help="redis://[user:password@]host:port or unix:///path", show_default=False),
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
        _fail(str(error))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Two engines share one store: tokens reused, time to the first token, exactness.

    With --format json (or --json) it prints one JSON object.
    """
    command = [sys.executable, "-P", "-m", "tailreplay.connector.demo", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def describe(
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """What a store is: every setting in force, and its namespaces."""
    answer = _ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=_TIMEOUT_S))
    _write(_plain(answer), cli_tables.describe, output_format, output, quiet)


@app.command()
def ping(
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Whether a store answers."""
    answer = _ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=_TIMEOUT_S))
    facts = {"address": url or default_socket(), "version": answer.version, "serving": True}
    _write(facts, cli_tables.facts, output_format, output, quiet)


@app.command()
def stats(
    url: Url = "",
    watch: Annotated[
        float, typer.Option(help="write again every so many seconds, 0 = once", min=0)
    ] = 0,
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Lookups, tokens, bytes by tier and kind, leases, damage found."""
    from threading import Event

    never = Event()
    while True:
        answer = _ask(url, lambda stub: stub.Stats(pb.StatsRequest(), timeout=_TIMEOUT_S))
        _write(_plain(answer), cli_tables.stats, output_format, output, quiet)
        if not watch or never.wait(watch):
            return


@app.command()
def explain(
    prompt: Annotated[Path, typer.Argument(help="JSON array of token ids; - for standard input")],
    other: Annotated[
        Path | None, typer.Argument(help="a second prompt, to see where it leaves the first")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="namespace, in hex; may be left out where the store has only one")
    ] = "",
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Why a prompt hits or misses: what is stored of it, and where two prompts part."""
    try:
        ids = _read_prompt(prompt)
        if other is not None:
            facts = _compare(ids, _read_prompt(other))
            _write(facts, cli_tables.facts, output_format, output, quiet)
            return
        space = _namespace(namespace, url)
        request = pb.MatchRequest(namespace=space, tokens=to_wire(extended_tokens(ids)))
    except InvalidRequest as error:
        _fail(str(error))
    answer = _ask(url, lambda stub: stub.Match(request, timeout=_TIMEOUT_S))
    plain = {"prompt_tokens": len(ids), **_plain(answer)}
    _write(plain, cli_tables.explain, output_format, output, quiet)


def main() -> None:
    """Entry point of the command."""
    app()


def _ask(url: str, call: Callable[[rpc.StoreStub], T]) -> T:
    """One RPC; an error ends the command with a message and code 1."""
    try:
        address = checked_address(url or default_socket())
        channel = _CREDENTIALS.get().channel(address, [("grpc.enable_http_proxy", 0)])
    except ValueError as error:
        _fail(str(error))
    with channel:
        try:
            return call(rpc.StoreStub(channel))
        except grpc.RpcError as error:
            _fail(str(from_rpc_error(error, address)))


def _plain(message: Message) -> dict[str, Any]:
    """A message as JSON types: zeros included, bytes in hex, 64-bit numbers as numbers."""
    plain = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _natural(plain, message)


def _natural(plain: dict[str, Any], message: Message) -> dict[str, Any]:
    """The fields in the order of the protocol, whatever their values."""
    result: dict[str, Any] = {}
    for name, field in message.DESCRIPTOR.fields_by_name.items():
        raw, value = getattr(message, name), plain[name]
        if field.type == field.TYPE_BYTES:
            value = raw.hex()
        elif field.type == field.TYPE_FIXED64:
            value = f"{raw:016x}"
        elif field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                value = [_natural(v, m) for v, m in zip(value, raw, strict=True)]
        elif field.type != field.TYPE_ENUM:
            value = raw
        result[name] = value
    return result


def _write(
    facts: dict[str, Any],
    table: Callable[[Console, dict[str, Any]], None],
    output_format: Format,
    output: Path | None,
    quiet: bool,
) -> None:
    if quiet:
        return
    try:
        with output.open("w", encoding="utf-8") if output else nullcontext(sys.stdout) as file:
            if output_format is Format.JSON:
                json.dump(facts, file, indent=2)
                file.write("\n")
            else:
                table(Console(file=file, highlight=False), facts)
    except OSError as error:
        _fail(f"{output} can not be written: {error.strerror}")


def _read_prompt(path: Path) -> list[int]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        ids = json.loads(text)
    except OSError as error:
        raise InvalidRequest(f"{path} can not be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is no JSON: {error}") from None
    if not isinstance(ids, list):
        raise InvalidRequest(f"{path} holds a JSON {type(ids).__name__}, wanted an array of ids")
    wrong = next(((i, v) for i, v in enumerate(ids) if type(v) is not int), None)
    if wrong is not None:
        raise InvalidRequest(f"{path} has {wrong[1]!r} at {wrong[0]}, wanted a token id")
    return ids


def _compare(first: list[int], second: list[int]) -> dict[str, Any]:
    """Where two prompts part, and what that costs the second."""
    pairs = zip(first, second, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    at = {
        name: ids[shared] if shared < len(ids) else None
        for name, ids in (("first", first), ("second", second))
    }
    return {
        "first_tokens": len(first),
        "second_tokens": len(second),
        "shared_tokens": shared,
        "first_differing_position": shared if shared < max(len(first), len(second)) else None,
        "token_in_first": at["first"],
        "token_in_second": at["second"],
        "tokens_to_prefill": len(second) - min(shared, max(len(second) - 1, 0)),
    }


def _namespace(given: str, url: str) -> bytes:
    if given:
        try:
            namespace = bytes.fromhex(given)
        except ValueError:
            namespace = b""
        if len(namespace) != NAMESPACE_BYTES:
            raise InvalidRequest(
                f"namespace is {given!r}, wanted {2 * NAMESPACE_BYTES} hex digits (see `describe`)"
            )
        return namespace
    answer = _ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=_TIMEOUT_S))
    if len(answer.namespaces) != 1:
        raise InvalidRequest(
            f"the store has {len(answer.namespaces)} namespaces, wanted --namespace to name one "
            "(see `describe`)"
        )
    return answer.namespaces[0].namespace


def _fail(message: str) -> NoReturn:
    typer.echo(f"tailreplay-store: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
