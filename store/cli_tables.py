"""Answers of the CLI as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

_SIZES = ("_bytes", "_bytes_per_token", "_bytes_per_s")
_WIDEST = 1000
_WHOLE = 1000.0
NOTHING = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(size: float) -> str:
    """A size with a binary unit, such as `1.5 MiB`."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit always returns")


def facts(console: Console, answer: dict[str, Any]) -> None:
    """Names and values, one per line."""
    width = max(map(len, answer), default=0)
    for name, value in answer.items():
        console.print(f"{name:{width}}  {_shown(name, value)}", markup=False, soft_wrap=True)


def describe(console: Console, answer: dict[str, Any]) -> None:
    """Identity, settings where they are told, namespaces."""
    facts(console, {name: answer[name] for name in ("version", "boot_id")})
    if answer["settings"]:
        console.print("\nsettings in force")
        facts(console, answer["settings"])
    for space in answer["namespaces"]:
        console.print()
        facts(console, space)


def stats(console: Console, answer: dict[str, Any]) -> None:
    """Counters, then bytes by tier and kind."""
    facts(console, {name: value for name, value in answer.items() if name != "tiers"})
    if answer["tiers"]:
        table = _table("tier", "kind", "objects", "bytes")
        for row in answer["tiers"]:
            tier, kind = row["tier"], row["kind"]
            table.add_row(tier, kind, str(row["objects"]), human_bytes(row["bytes"]))
        _print(console, table)


def explain(console: Console, answer: dict[str, Any]) -> None:
    """What is stored of a prompt."""
    facts(console, {name: answer[name] for name in ("prompt_tokens", "matched_tokens")})
    table = _table("kind", "tokens", "tier", "provenance")
    for run in answer["runs"]:
        span = f"{run['first_token']} to {run['end_token']}"
        table.add_row(run["kind"], span, run["tier"], run["provenance"])
    for point in answer["checkpoints"]:
        table.add_row("checkpoint", f"at {point['token']}", point["tier"], point["provenance"])
    _print(console, table)


def objects(console: Console, answer: dict[str, Any]) -> None:
    """Every object of a prefix."""
    facts(console, {name: answer[name] for name in ("matched_tokens", "tenant")})
    table = _table("kind", "tokens", "bytes", "tiers", "provenance", "idle s", "pin", "name")
    for row in answer["objects"]:
        table.add_row(
            row["kind"],
            _where(row),
            human_bytes(row["size_bytes"]),
            "+".join(row["tiers"]),
            row["provenance"],
            f"{row['idle_s']:.0f}",
            "yes" if row["pinned"] else "",
            row["prefix_hash"][:8],
        )
    _print(console, table)


def pins(console: Console, answer: dict[str, Any]) -> None:
    """Every pin, and below it whose it is."""
    table = _table("pin_id", "tokens", "bytes", "left out", "ends in s")
    for row in answer["pins"]:
        table.add_row(
            row["pin_id"],
            f"{row['pinned_tokens']} of {row['tokens']}",
            human_bytes(row["bytes"]),
            human_bytes(row["left_out_bytes"]),
            f"{row['expires_in_s']:.0f}",
        )
        table.add_row(f"  {row['namespace'][:8]}, {row['objects']} objects")
    _print(console, table)


def tenants(console: Console, answer: dict[str, Any]) -> None:
    """Use of every tenant, and below it the limits that it has."""
    table = _table("tenant", "spaces", "cpu", "redis", "evicted", "refused")
    for row in answer["tenants"]:
        table.add_row(
            row["tenant"] or NOTHING,
            str(row["namespaces"]),
            human_bytes(row["cpu_bytes"]),
            human_bytes(row["redis_bytes"]),
            human_bytes(row["evicted_bytes"]),
            str(row["refused_objects"]),
        )
        limits = row["cpu_limit_bytes"], row["redis_limit_bytes"]
        if limits != (None, None):
            table.add_row("  limit", "", *map(_limit, limits))
    _print(console, table)


def removed(console: Console, answer: dict[str, Any]) -> None:
    """What has gone, by tier and kind, and what a count found afterwards."""
    rows = answer["removed"]
    table = _table("tier", "kind", "objects", "bytes")
    for row in rows:
        table.add_row(row["tier"], row["kind"], str(row["objects"]), human_bytes(row["bytes"]))
    if rows:
        _print(console, table)
    else:
        console.print("nothing was there")
    facts(console, {name: value for name, value in answer.items() if name != "removed"})


def public(console: Console, answer: dict[str, Any]) -> None:
    """Every public prefix."""
    table = _table("prefix", "tokens", "stored", "cpu", "redis", "since")
    for row in answer["prefixes"]:
        in_tier = Counter[str]()
        for place in row["tiers"]:
            in_tier[place["tier"]] += place["bytes"]
        table.add_row(
            row["prefix_hash"],
            str(row["tokens"]),
            str(row["stored_tokens"]),
            human_bytes(in_tier["cpu"]),
            human_bytes(in_tier["redis"]),
            _date(row["added_at_s"]),
        )
    _print(console, table)


def public_prefix(console: Console, answer: dict[str, Any]) -> None:
    """One public prefix."""
    public(console, {"prefixes": [answer]})


def checks(console: Console, answer: dict[str, Any]) -> None:
    """What was looked at, what was found, and what to do."""
    marks = {"ok": "ok", "warn": "look", "fail": "FAIL", "skip": "-"}
    for row in answer["checks"]:
        console.print(
            f"{marks[row['state']]:4}  {row['check']}: {row['found']}",
            markup=False,
            soft_wrap=True,
        )
        if row["todo"]:
            console.print(f"      {row['todo']}", markup=False, soft_wrap=True)


def top(console: Console, answer: dict[str, Any]) -> None:
    """Rates since the last look, what is full, and who fills it."""
    facts(console, {name: value for name, value in answer.items() if name != "tenants"})
    if answer["tenants"]:
        tenants(console, answer)


def _where(row: dict[str, Any]) -> str:
    """Of which tokens an object is; a checkpoint is of all up to one."""
    if row["kind"] == "checkpoint":
        return f"at {row['end_token']}"
    return f"{row['first_token']} to {row['end_token']}"


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


def _limit(size: int | None) -> str:
    return NOTHING if size is None else human_bytes(size)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    """A table as wide as it is: a terminal wraps what one may want to copy, and cuts nothing."""
    width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    console.width = max(console.width, width)
    console.print(table)


def _shown(name: str, value: Any) -> str:  # noqa: ANN401 - JSON
    if value in (None, "", []):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if (name == "bytes" or name.endswith(_SIZES)) and str(value).isdecimal():
        return human_bytes(int(value))
    if isinstance(value, float):
        return f"{value:.0f}" if value >= _WHOLE else f"{value:.4g}"
    return str(value)
