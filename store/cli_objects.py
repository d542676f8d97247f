"""Commands that take a prompt: what a store has of it, and every object of that."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import Namespace, Prompt, fail, misused, plain, read_prompt, size_of
from tailreplay.store.cli_tenant import Digest, OfTenant, tenant_or_any
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.tokens import extended_tokens, to_wire

if TYPE_CHECKING:
    from pathlib import Path

app = typer.Typer()

_KINDS = {pb.KIND_KV: "kv", pb.KIND_HIDDEN: "hidden"}
_TIERS = {pb.TIER_CPU: "cpu", pb.TIER_REDIS: "redis"}
_PLACES = [*product(_KINDS.values(), _TIERS.values())]


@command(app)
def query(
    asked: Asked,
    prompt: Prompt,
    namespace: Namespace = "",
    tenant: OfTenant = "",
    digest: Digest = False,
) -> None:
    """How many tokens of a prompt are stored, by kind; code 1 when none is."""
    of_tenant = tenant_or_any(tenant, digest)
    tokens, space = _tokens(prompt), asked.sent_namespace(namespace, of_tenant)
    answer: pb.MatchResponse = asked.store("Match", pb.MatchRequest(namespace=space, tokens=tokens))
    of: Counter[str] = Counter()
    for run in answer.runs:
        rows = run.end_token - run.first_token
        kind, tier = _KINDS[run.kind], _TIERS[run.tier]
        of[f"{kind}_tokens"] += rows
        of[f"{kind}_tokens_in_{tier}"] += rows
    facts: dict[str, Any] = {
        "prompt_tokens": len(tokens.ids) // 4,
        "matched_tokens": answer.matched_tokens,
        "kv_tokens": of["kv_tokens"],
        "hidden_tokens": of["hidden_tokens"],
        "checkpoints": len(answer.checkpoints),
        "last_checkpoint": max((c.token for c in answer.checkpoints), default=0),
        **{name: of[name] for name in (f"{k}_tokens_in_{t}" for k, t in _PLACES)},
    }
    asked.write(facts, cli_tables.facts)
    if not answer.matched_tokens:
        fail("nothing of this prompt is stored")


@command(app, operators=True)
def inspect(
    asked: Asked,
    prompt: Prompt,
    namespace: Namespace = "",
    tenant: OfTenant = "",
    digest: Digest = False,
) -> None:
    """Every object along a prompt's stored prefix: kind, tokens, bytes, tiers, age."""
    of_tenant = tenant_or_any(tenant, digest)
    tokens, space = _tokens(prompt), asked.namespace(namespace, of_tenant)
    request = pb.InspectRequest(namespace=space, tokens=tokens)
    answer = asked.admin("Inspect", request)
    asked.write(plain(answer), cli_tables.objects)


@command(app, operators=True)
def pin(
    asked: Asked,
    prompt: Prompt,
    seconds: Annotated[float, typer.Option("--for", help="life of the pin, seconds")] = 3600,
    max_bytes: Annotated[
        str,
        typer.Option(
            help="most that it may hold, such as 512MiB; 0 = what is left for pins", metavar="BYTES"
        ),
    ] = "0",
    namespace: Namespace = "",
    tenant: OfTenant = "",
    digest: Digest = False,
) -> None:
    """Keep what is stored of a prompt in the CPU tier; early blocks first."""
    if not seconds > 0:
        misused(f"--for is {seconds:g}, wanted more than 0 seconds")
    limit = size_of("--max-bytes", max_bytes)
    of_tenant = tenant_or_any(tenant, digest)
    tokens, space = _tokens(prompt), asked.namespace(namespace, of_tenant)
    request = pb.PinRequest(namespace=space, tokens=tokens, max_bytes=limit, seconds=seconds)
    answer = asked.admin("Pin", request)
    asked.write(plain(answer), cli_tables.facts)


def _tokens(prompt: Path) -> pb.Tokens:
    try:
        return to_wire(extended_tokens(read_prompt(prompt)))
    except InvalidRequest as error:
        fail(str(error))
