"""What every command shares: options, asking a store, reading prompts, writing answers."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.address import checked_address
from tailreplay.store.config import default_socket
from tailreplay.store.credentials import NO_CREDENTIALS
from tailreplay.store.errors import InvalidRequest, from_rpc_error
from tailreplay.store.json_file import read_json
from tailreplay.store.namespace import NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message


class Format(StrEnum):
    """How an answer is written."""

    TERMINAL = "terminal"
    JSON = "json"


Url = Annotated[
    str, typer.Option("--url", help="store address", envvar="TAILREPLAY_LISTEN", show_default=False)
]
AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url",
        help="where the store listens for operators; default: beside its socket",
        envvar="TAILREPLAY_ADMIN_LISTEN",
        show_default=False,
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="how to write the answer")]
Output = Annotated[
    Path | None, typer.Option("--output", help="write the answer to this file", show_default=False)
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="write nothing; the exit code tells")]
Prompt = Annotated[Path, typer.Argument(help="JSON array of token ids; - for standard input")]
Namespace = Annotated[
    str, typer.Option(help="namespace, in hex; may be left out where the store has only one")
]

TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 300.0
"""An erasure scans all of Redis."""

CREDENTIALS = ContextVar("credentials", default=NO_CREDENTIALS)

T = TypeVar("T")


def ask(url: str, call: Callable[[rpc.StoreStub], T]) -> T:
    """One RPC; an error ends the command with a message and code 1."""
    return _ask(url or default_socket(), lambda channel: call(rpc.StoreStub(channel)))


def ask_admin(url: str, admin_url: str, call: Callable[[rpc.AdminStub], T]) -> T:
    """As `ask`, of the service for operators."""
    return _ask(admin_address(url, admin_url), lambda channel: call(rpc.AdminStub(channel)))


def admin_address(url: str, admin_url: str) -> str:
    """Where a store listens for operators."""
    beside = url or default_socket()
    if not admin_url and not beside.startswith("unix:"):
        fail(f"operators' address of {beside} is not known, wanted --admin-url")
    return admin_url or f"{beside}.admin"


def _ask(url: str, call: Callable[[grpc.Channel], T]) -> T:
    try:
        address = checked_address(url)
        channel = CREDENTIALS.get().channel(address, [("grpc.enable_http_proxy", 0)])
    except ValueError as error:
        fail(str(error))
    with channel:
        try:
            return call(channel)
        except grpc.RpcError as error:
            fail(str(from_rpc_error(error, address)))


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON types: zeros included, bytes in hex, 64-bit numbers as numbers."""
    plain = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _natural(plain, message)


def _natural(plain: dict[str, Any], message: Message) -> dict[str, Any]:
    """The fields in the order of the protocol, whatever their values."""
    result: dict[str, Any] = {}
    for name, field in message.DESCRIPTOR.fields_by_name.items():
        if field.has_presence and field.message_type is None and not message.HasField(name):
            result[name] = None
            continue
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


def write(
    facts: dict[str, Any],
    table: Callable[[Console, dict[str, Any]], None],
    output_format: Format,
    output: Path | None,
    quiet: bool,
) -> None:
    """Writes an answer where and as it is wanted."""
    if quiet:
        return
    try:
        with output.open("w", encoding="utf-8") if output else nullcontext(sys.stdout) as file:
            if output_format is Format.JSON:
                json.dump(facts, file, indent=2)
                file.write("\n")
                file.flush()  # a pipe has each look when it is there
            else:
                table(Console(file=file, highlight=False), facts)
    except OSError as error:
        fail(f"{output} can not be written: {error.strerror}")


def read_prompt(path: Path) -> list[int]:
    """Token ids of a file, or of standard input.

    Raises:
        InvalidRequest: it can not be read, or holds something else.
    """
    ids = read_json(path, or_stdin=True)
    if not isinstance(ids, list):
        raise InvalidRequest(f"{path} holds a JSON {type(ids).__name__}, wanted an array of ids")
    wrong = next(((i, v) for i, v in enumerate(ids) if type(v) is not int), None)
    if wrong is not None:
        raise InvalidRequest(f"{path} has {wrong[1]!r} at {wrong[0]}, wanted a token id")
    return ids


def namespace_of(given: str, url: str) -> bytes:
    """The namespace that was given, or the only one that a store has.

    Raises:
        InvalidRequest: it is malformed, or there is not exactly one.
    """
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
    answer = ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S))
    if not answer.namespaces:
        raise InvalidRequest(
            "the store names no namespace: nothing is stored yet, or your token is no "
            "administrator's; wanted --namespace"
        )
    if len(answer.namespaces) != 1:
        raise InvalidRequest(
            f"the store has {len(answer.namespaces)} namespaces, wanted --namespace to name one "
            "(see `describe`)"
        )
    return answer.namespaces[0].namespace


def fail(message: str) -> NoReturn:
    """Ends the command with a message and code 1."""
    typer.echo(f"tailreplay-store: {message}", err=True)
    raise typer.Exit(1)
