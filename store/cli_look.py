"""Commands that look at a store: what it is, what it does, why a prompt hits or misses."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import Namespace, Prompt, fail, plain, read_prompt
from tailreplay.store.cli_tenant import Digest, OfTenant, tenant_or_any
from tailreplay.store.errors import (
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    TailReplayError,
)
from tailreplay.store.prompt_cost import prompt_cost
from tailreplay.store.setting_words import typed
from tailreplay.store.tokens import extended_tokens, to_wire

app = typer.Typer()

_TOLD = ("kv_bytes_per_token", "hidden_bytes_per_token", "checkpoint_bytes", "capacity_tokens")


@command(app)
def describe(asked: Asked) -> None:
    """What a store is: every setting in force, and its namespaces."""
    facts = plain(asked.store("Describe", pb.DescribeRequest()))
    facts["settings"] = typed(facts["settings"])
    facts["namespaces"] = [
        # A size that no object has told since the start is not known, nor are others' to a tenant.
        {name: None if name in _TOLD and not value else value for name, value in space.items()}
        for space in facts["namespaces"]
    ]
    asked.write(facts, cli_tables.describe)


@command(app)
def ping(asked: Asked) -> None:
    """Whether a store answers, whoever asks; its version is told to those with a token."""
    serving = asked.is_serving()
    try:
        version = asked.called("Describe", pb.DescribeRequest()).version
    except (NotAllowed, NotAuthenticated):
        version = None
    except TailReplayError as error:
        fail(str(error))
    facts = {"address": asked.address, "version": version, "serving": serving}
    asked.write(facts, cli_tables.facts)
    if not serving:
        fail(f"store at {asked.address} says that it does not serve: it is about to stop")


@command(app)
def stats(
    asked: Asked,
    watch: Annotated[
        float, typer.Option(help="write again every so many seconds, 0 = once", min=0)
    ] = 0,
) -> None:
    """Lookups, tokens, bytes by tier and kind, leases, damage found.

    With --watch, JSON is a line for each look, and a file has all of them.
    """
    if not watch:
        asked.write(plain(asked.store("Stats", pb.StatsRequest())), cli_tables.stats)
        return
    never = Event()
    for look in count():
        answer = asked.store("Stats", pb.StatsRequest())
        if not asked.write_look(plain(answer), cli_tables.stats, look):
            return
        never.wait(watch)


@command(app)
def explain(
    asked: Asked,
    prompt: Prompt,
    other: Annotated[
        Path | None, typer.Argument(help="a second prompt, to see where it leaves the first")
    ] = None,
    namespace: Namespace = "",
    tenant: OfTenant = "",
    digest: Digest = False,
) -> None:
    """Why a prompt hits or misses: what is stored of it, and where two prompts part.

    With two prompts: what the second costs an exact engine from the nearest checkpoint that the
    store has where they part or before.
    """
    of_tenant = tenant_or_any(tenant, digest)
    try:
        ids = read_prompt(prompt)
        if other is not None:
            second = read_prompt(other)
            facts = _compare(ids, second)
            facts |= _costs(asked, namespace, of_tenant, second, facts["shared_tokens"])
            asked.write(facts, cli_tables.facts)
            return
        tokens = to_wire(extended_tokens(ids))
    except InvalidRequest as error:
        fail(str(error))
    space = asked.sent_namespace(namespace, of_tenant)
    answer = asked.store("Match", pb.MatchRequest(namespace=space, tokens=tokens))
    facts = {"prompt_tokens": len(ids), **plain(answer)}
    asked.write(facts, cli_tables.explain)


def _compare(first: list[int], second: list[int]) -> dict[str, Any]:
    """Where two prompts part."""
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
    }


def _costs(
    asked: Asked, namespace: str, tenant: bytes, ids: list[int], shared: int
) -> dict[str, Any]:
    """What a prompt costs of which `shared` tokens may be stored, and how that was counted."""
    tokens = to_wire(extended_tokens(ids))
    is_named = bool(namespace or tenant)
    space = asked.sent_namespace(namespace, tenant) if is_named else b""
    try:
        request = pb.MatchRequest(namespace=space or asked.only_namespace(), tokens=tokens)
        answer = asked.called("Match", request)
    except TailReplayError as error:
        if is_named:
            fail(str(error))
        return {
            "from_checkpoint": None,
            "tokens_to_replay": None,
            "tokens_to_prefill": len(ids) - min(shared, max(len(ids) - 1, 0)),
            "counted": f"as if a checkpoint were stored where they part; no store said: {error}",
        }
    cost = prompt_cost(answer, shared, len(ids))
    return {
        "from_checkpoint": cost.from_checkpoint,
        "tokens_to_replay": cost.to_replay,
        "tokens_to_prefill": cost.to_prefill,
        "counted": "from what the store has, for mode exact with default settings",
    }
