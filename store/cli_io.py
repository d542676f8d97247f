"""What commands take and give: prompts read, messages as JSON types, answers written."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from tailreplay.store.byte_size import byte_size
from tailreplay.store.credentials import NO_CREDENTIALS
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.json_file import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message
    from pydantic import ValidationError

    from tailreplay.proto import store_pb2 as pb


class Format(StrEnum):
    """How an answer is written."""

    TERMINAL = "terminal"
    JSON = "json"


Prompt = Annotated[Path, typer.Argument(help="JSON array of token ids; - for standard input")]
Namespace = Annotated[
    str, typer.Option(help="namespace, in hex; may be left out where the store has only one")
]

CREDENTIALS = ContextVar("credentials", default=NO_CREDENTIALS)
QUIET = ContextVar("quiet", default=False)
"""Whether the exit code alone is to tell."""


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON types: zeros included, bytes in hex, 64-bit numbers as numbers.

    What is one of a few is a word: `TIER_CPU` is `cpu`.
    """
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
        elif field.type == field.TYPE_ENUM:
            value = [*map(_word, value)] if isinstance(value, list) else _word(value)
        else:
            value = raw
        result[name] = value
    return result


def _word(enum_name: str) -> str:
    return enum_name.partition("_")[2].lower()


def as_text(
    facts: dict[str, Any],
    table: Callable[[Console, dict[str, Any]], None],
    output_format: Format,
    *,
    is_look: bool = False,
) -> str:
    """An answer as it is wanted: as JSON, or as `table` draws it.

    Args:
        facts: the answer.
        table: draws it for a terminal.
        output_format: which of the two.
        is_look: whether others follow: each is a line of JSON, or has a blank line behind it.
    """
    if output_format is Format.JSON:
        return json.dumps(facts, indent=None if is_look else 2) + "\n"
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as drawn:
        table(console, facts)
    return drawn.get() + ("\n" if is_look else "")


def write(text: str, output: Path | None, *, behind: bool = False) -> bool:
    """Writes an answer to a file, or to standard output where that is None.

    Args:
        text: the answer.
        output: the file.
        behind: whether it goes behind what the file has.

    Returns:
        False when whoever reads standard output has seen enough, which is no error.
    """
    mode = "a" if behind else "w"
    try:
        with output.open(mode, encoding="utf-8") if output else nullcontext(sys.stdout) as file:
            file.write(text)
            file.flush()  # a pipe has each look when it is there
    except OSError as error:
        if output is None and isinstance(error, BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # or Python would write it at its end
            os.close(nowhere)
            return False
        fail(f"{output or 'standard output'} can not be written: {error.strerror}")
    return True


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


def size_of(name: str, text: str) -> int:
    """Bytes in `512MiB`, `20g` or a number of bytes, given as `name`; ends the command if wrong."""
    try:
        return byte_size(text)
    except ValueError as error:
        misused(f"{name} is {text!r}, {error}")


def is_left(answer: pb.EraseResponse | pb.RemovePublicResponse) -> bool:
    """Whether anything is left of what was erased, or somebody did not say so."""
    counted = (
        answer.cpu_objects_left,
        answer.redis_keys_left,
        answer.held_objects,
        answer.bulk_files_left,
    )
    return any(counted) or bool(answer.silent_stores)


def fail(message: str) -> NoReturn:
    """Ends the command with code 1, and with a message unless it is to be quiet."""
    if not QUIET.get():
        typer.echo(f"tailreplay-store: {message}", err=True)
    raise typer.Exit(1)


def misused(message: str) -> NoReturn:
    """Ends the command with a message and code 2: what is wrong is the command line itself."""
    typer.echo(f"tailreplay-store: {message}", err=True)
    raise typer.Exit(2)


def note(message: str) -> None:
    """Says something beside the answer, unless the command is to be quiet."""
    if not QUIET.get():
        typer.echo(f"tailreplay-store: {message}", err=True)


def complaints(error: ValidationError) -> str:
    """What is wrong with values that were given; the values are not repeated."""
    items = error.errors(include_url=False, include_input=False)
    return "; ".join(item["msg"].removeprefix("Value error, ") for item in items)


def from_hex(what: str, given: str, command: str, size: int) -> bytes:
    """Bytes given in hex; ends the command if they are none, or not `size`.

    Args:
        what: they are, and `command` what shows them.
        given: hex digits.
        command: see `what`.
        size: how many bytes are wanted.
    """
    try:
        found = bytes.fromhex(given)
    except ValueError:
        found = None
    if found is None or len(found) != size:
        misused(f"{what} is {given!r}, wanted {2 * size} hex digits (see `{command}`)")
    return found
