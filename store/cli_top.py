"""`top`: what a store does now, and for whom."""

from __future__ import annotations

import time
from itertools import count
from threading import Event
from typing import Annotated, Any

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import plain

app = typer.Typer()

_BYTES = ("stored_bytes", "served_bytes", "evicted_bytes")


@command(app, operators=True)
def top(
    asked: Asked,
    every: Annotated[float, typer.Option(help="seconds between looks", min=0.05)] = 2.0,
    looks: Annotated[int, typer.Option(help="how many, 0 = until stopped", min=0)] = 0,
) -> None:
    """Lookups, hits and bytes a second; how full the pool is, and of whom.

    JSON is a line for each look, and a file has all of them.
    """
    never = Event()
    before, then = _stats(asked), time.monotonic()
    for look in range(looks) if looks else count():
        never.wait(every)
        now, at = _stats(asked), time.monotonic()
        facts = _rates(before, now, at - then)
        facts["tenants"] = _tenants(asked)
        if not asked.write_look(facts, cli_tables.top, look):
            return
        before, then = now, at


def _stats(asked: Asked) -> pb.StatsResponse:
    figures: pb.StatsResponse = asked.store("Stats", pb.StatsRequest())
    return figures


def _rates(before: pb.StatsResponse, now: pb.StatsResponse, seconds: float) -> dict[str, Any]:
    def since(name: str) -> int:
        # A store that was restarted begins at 0.
        grown: int = getattr(now, name) - getattr(before, name)
        return grown if grown >= 0 else int(getattr(now, name))

    queried = since("queried_tokens")
    return {
        "seconds": round(seconds, 3),
        "lookups_per_s": round(since("lookups") / seconds, 1),
        "matched_share": round(since("matched_tokens") / queried, 4) if queried else None,
        **{f"{name}_per_s": int(since(name) / seconds) for name in _BYTES},
        "pool_bytes": now.pool_bytes,
        "pool_used_bytes": now.pool_used_bytes,
        "pinned_bytes": now.pinned_bytes,
        "leases": now.leases,
        "redis_pending_bytes": now.redis_pending_bytes,
        "dropped_objects": since("dropped_objects"),
        "integrity_errors": since("integrity_errors"),
    }


def _tenants(asked: Asked) -> list[dict[str, Any]]:
    """The ten that fill most of the pool."""
    answer = asked.admin("ListTenants", pb.ListTenantsRequest())
    most = sorted(answer.tenants, key=lambda tenant: tenant.cpu_bytes, reverse=True)[:10]
    rows: list[dict[str, Any]] = plain(pb.ListTenantsResponse(tenants=most))["tenants"]
    return rows
