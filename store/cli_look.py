"""Commands that look at a store: what it is, what it does, why a prompt hits or misses."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_io import (
    TIMEOUT_S,
    Format,
    FormatOption,
    Namespace,
    Output,
    Prompt,
    Quiet,
    Url,
    ask,
    fail,
    namespace_of,
    plain,
    read_prompt,
    write,
)
from tailreplay.store.config import default_socket
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.tokens import extended_tokens, to_wire

app = typer.Typer()


@app.command()
def describe(
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """What a store is: every setting in force, and its namespaces."""
    answer = ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S))
    write(plain(answer), cli_tables.describe, output_format, output, quiet)


@app.command()
def ping(
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Whether a store answers."""
    answer = ask(url, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S))
    facts = {"address": url or default_socket(), "version": answer.version, "serving": True}
    write(facts, cli_tables.facts, output_format, output, quiet)


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
    never = Event()
    while True:
        answer = ask(url, lambda stub: stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S))
        write(plain(answer), cli_tables.stats, output_format, output, quiet)
        if not watch or never.wait(watch):
            return


@app.command()
def explain(
    prompt: Prompt,
    other: Annotated[
        Path | None, typer.Argument(help="a second prompt, to see where it leaves the first")
    ] = None,
    namespace: Namespace = "",
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Why a prompt hits or misses: what is stored of it, and where two prompts part."""
    try:
        ids = read_prompt(prompt)
        if other is not None:
            facts = _compare(ids, read_prompt(other))
            write(facts, cli_tables.facts, output_format, output, quiet)
            return
        space = namespace_of(namespace, url)
        request = pb.MatchRequest(namespace=space, tokens=to_wire(extended_tokens(ids)))
    except InvalidRequest as error:
        fail(str(error))
    answer = ask(url, lambda stub: stub.Match(request, timeout=TIMEOUT_S))
    facts = {"prompt_tokens": len(ids), **plain(answer)}
    write(facts, cli_tables.explain, output_format, output, quiet)


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
