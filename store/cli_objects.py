"""Commands that take a prompt: what a store has of it, and every object of that."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_io import (
    ADMIN_TIMEOUT_S,
    TIMEOUT_S,
    AdminUrl,
    Format,
    FormatOption,
    Namespace,
    Output,
    Prompt,
    Quiet,
    Url,
    ask,
    ask_admin,
    fail,
    namespace_of,
    plain,
    read_prompt,
    write,
)
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.tokens import extended_tokens, to_wire

if TYPE_CHECKING:
    from pathlib import Path

app = typer.Typer()


@app.command()
def query(
    prompt: Prompt,
    namespace: Namespace = "",
    url: Url = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """How many tokens of a prompt are stored, by kind; code 1 when none is."""
    space, tokens = _asked(prompt, namespace, url)
    request = pb.MatchRequest(namespace=space, tokens=tokens)
    answer = ask(url, lambda stub: stub.Match(request, timeout=TIMEOUT_S))
    of: Counter[str] = Counter()
    for run in answer.runs:
        rows = run.end_token - run.first_token
        kind, tier = (
            cli_tables.word(pb.Kind.Name(run.kind)),
            cli_tables.word(pb.Tier.Name(run.tier)),
        )
        of[f"{kind}_tokens"] += rows
        of[f"{kind}_tokens_in_{tier}"] += rows
    facts: dict[str, Any] = {
        "prompt_tokens": len(tokens.ids) // 4,
        "matched_tokens": answer.matched_tokens,
        "kv_tokens": of["kv_tokens"],
        "hidden_tokens": of["hidden_tokens"],
        "checkpoints": len(answer.checkpoints),
        "last_checkpoint": max((c.token for c in answer.checkpoints), default=0),
        **{name: n for name, n in sorted(of.items()) if "_in_" in name},
    }
    write(facts, cli_tables.facts, output_format, output, quiet)
    if not answer.matched_tokens:
        raise typer.Exit(1)


@app.command()
def inspect(
    prompt: Prompt,
    namespace: Namespace = "",
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Every object along a prompt's stored prefix: kind, tokens, bytes, tiers, age."""
    space, tokens = _asked(prompt, namespace, url)
    request = pb.InspectRequest(namespace=space, tokens=tokens)
    answer = ask_admin(url, admin_url, lambda stub: stub.Inspect(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.objects, output_format, output, quiet)


@app.command()
def pin(
    prompt: Prompt,
    seconds: Annotated[float, typer.Option("--for", help="life of the pin, seconds", min=0)] = 3600,
    max_bytes: Annotated[
        int, typer.Option(help="most bytes that it may hold; 0 = what is left for pins", min=0)
    ] = 0,
    namespace: Namespace = "",
    url: Url = "",
    admin_url: AdminUrl = "",
    output_format: FormatOption = Format.TERMINAL,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Keep what is stored of a prompt in the CPU tier; early blocks first."""
    space, tokens = _asked(prompt, namespace, url)
    request = pb.PinRequest(namespace=space, tokens=tokens, max_bytes=max_bytes, seconds=seconds)
    answer = ask_admin(url, admin_url, lambda stub: stub.Pin(request, timeout=ADMIN_TIMEOUT_S))
    write(plain(answer), cli_tables.facts, output_format, output, quiet)


def _asked(prompt: Path, namespace: str, url: str) -> tuple[bytes, pb.Tokens]:
    try:
        tokens = to_wire(extended_tokens(read_prompt(prompt)))
        return namespace_of(namespace, url), tokens
    except InvalidRequest as error:
        fail(str(error))
