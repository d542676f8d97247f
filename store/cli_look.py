"""Commands that look at a store: what it is, what it does, why a prompt hits or misses."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import Namespace, Prompt, fail, plain, read_prompt
from tailreplay.store.errors import InvalidRequest, TailReplayError
from tailreplay.store.prompt_cost import prompt_cost
from tailreplay.store.tokens import extended_tokens, to_wire

app = typer.Typer()


@command(app)
def describe(asked: Asked) -> None:
    """What a store is: every setting in force, and its namespaces."""
    answer = asked.store("Describe", pb.DescribeRequest())
    asked.write(plain(answer), cli_tables.describe)


@command(app)
def ping(asked: Asked) -> None:
    """Whether a store answers."""
    answer = asked.store("Describe", pb.DescribeRequest())
    facts = {"address": asked.address, "version": answer.version, "serving": True}
    asked.write(facts, cli_tables.facts)


@command(app)
def stats(
    asked: Asked,
    watch: Annotated[
        float, typer.Option(help="write again every so many seconds, 0 = once", min=0)
    ] = 0,
) -> None:
    """Lookups, tokens, bytes by tier and kind, leases, damage found."""
    never = Event()
    while True:
        answer = asked.store("Stats", pb.StatsRequest())
        asked.write(plain(answer), cli_tables.stats)
        if not watch or never.wait(watch):
            return


@command(app)
def explain(
    asked: Asked,
    prompt: Prompt,
    other: Annotated[
        Path | None, typer.Argument(help="a second prompt, to see where it leaves the first")
    ] = None,
    namespace: Namespace = "",
) -> None:
    """Why a prompt hits or misses: what is stored of it, and where two prompts part.

    With two prompts: what the second costs an exact engine from the nearest state that the store
    has where they part or before.
    """
    try:
        ids = read_prompt(prompt)
        if other is not None:
            second = read_prompt(other)
            facts = _compare(ids, second)
            facts |= _costs(asked, namespace, second, facts["shared_tokens"])
            asked.write(facts, cli_tables.facts)
            return
        tokens = to_wire(extended_tokens(ids))
    except InvalidRequest as error:
        fail(str(error))
    space = asked.sent_namespace(namespace)
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


def _costs(asked: Asked, namespace: str, ids: list[int], shared: int) -> dict[str, Any]:
    """What a prompt costs of which `shared` tokens may be stored, and how that was counted."""
    tokens = to_wire(extended_tokens(ids))
    space = asked.sent_namespace(namespace) if namespace else b""
    try:
        request = pb.MatchRequest(namespace=space or asked.only_namespace(), tokens=tokens)
        answer = asked.called("Match", request)
    except TailReplayError as error:
        if namespace:
            fail(str(error))
        return {
            "from_state": None,
            "tokens_to_replay": None,
            "tokens_to_prefill": len(ids) - min(shared, max(len(ids) - 1, 0)),
            "counted": f"as if a state were stored where they part; no store said: {error}",
        }
    cost = prompt_cost(answer, shared, len(ids))
    return {
        "from_state": cost.from_state,
        "tokens_to_replay": cost.to_replay,
        "tokens_to_prefill": cost.to_prefill,
        "counted": "from what the store has, for mode exact with default settings",
    }
