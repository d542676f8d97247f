"""The demo's figures as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from tailreplay.store.cli_tables import human_bytes

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("", "matched", "used", "replayed", "again", "cold", "TTFT", "off by", "answer")
_KINDS = ("kv", "hidden", "checkpoint")
LEGEND = (
    ("again", "shared tokens that were prefilled again, since no state lay nearer"),
    ("cold", "ms to the first token without the store, measured beside each row"),
    ("TTFT", "ms to the first token with it; times vary with the machine's load"),
    ("off by", "largest relative difference of the first logits from a prefill's"),
    ("exact", "the nearest stored state, the gap behind it closed; exact"),
    ("tail", "states rebuilt from the last 5% or 10% of the tokens: approximate"),
    ("auto", "a tail where it is known to be good enough, else exact"),
    ("zero", "states zeroed, a control: fast, but right by attention alone"),
    ("off", "without the store"),
)
"""What columns and rows mean."""
_CHECKS = {
    "matched_is_shared": "every mode that asks the fresh store matched exactly the shared tokens",
    "exact_uses_all": "exact used every matched token",
    "exact_is_exact": "exact gave the logits of a full prefill (1e-4 relative)",
    "two_round_trips": "a hit took two round trips",
    "second_visit_needs_nothing": "the second visit to a junction replayed and prefilled nothing",
    "answers_are_right": "exact, auto and the restarted store answered as a full prefill, rightly",
    "states_carry_the_answer": "the second model's answer was lost with its states, exact kept it",
    "store_down_prefills": "with the store down the request simply prefilled",
    "restart_keeps_hits": "after kill -9 and restart the hit came back, exact, out of Redis",
}


def show_rows(console: Console, result: dict[str, Any]) -> None:
    """One table per part of the demo."""
    shared, total = result["shared_tokens"], result["prompt_tokens"]
    console.print(f"\nPrompts of {total} tokens; the first {shared} were prefilled elsewhere.")
    console.print('They hold "Harriet = 17;" among the text, and end in "Harriet is".')
    right = result["right_answer"]
    console.print(f'The right answer is "{right.strip()}". The columns and rows:\n')
    for name, meaning in LEGEND:
        console.print(f"  {name:7}  {meaning}", markup=False)
    console.print()
    parts = [("fresh store", result["fresh"])]
    parts.append(("second visit", [result["second_visit"]]))
    if "restarted" in result:
        parts.append(("after kill -9, from Redis", result["restarted"]))
    parts.append(("store down", [result["store_down"]]))
    title = "the same, asked of a model that keeps facts in its states"
    parts.append((title, result["in_states"]))
    for title, rows in parts:
        _print(console, title, _COLUMNS, [_cells(row, right) for row in rows])
    loaded = [
        [f"{row['row']}, {title}", *_loaded(row, tier)]
        for title, rows in parts[:-1]
        for row in rows
        for tier in row["report"]["bytes"]
    ]
    _print(console, "loaded, by tier and kind", ("", "tier", *_KINDS), loaded)


def _print(console: Console, title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def show_checks(console: Console, checks: dict[str, bool]) -> None:
    """What had to hold, and whether it did."""
    for name, holds in checks.items():
        console.print(f"{'ok    ' if holds else 'FAILED'} {_CHECKS[name]}")


def _cells(row: dict[str, Any], right: str) -> list[str]:
    report = row["report"]
    why = report["miss_reason"] or report["mode"]
    used_as = "" if row["row"].startswith(report["mode"]) else f" ({why})"
    names = ("matched_tokens", "used_tokens", "replayed_tokens", "recomputed_tokens")
    return [
        row["row"] + used_as,
        *(str(report[name]) for name in names),
        f"{row['cold_ttft_s'] * 1000:.0f}",
        f"{report['ttft_s'] * 1000:.0f}",
        f"{row['largest_difference']:.1e}",
        row["answer"] if row["answer"] == right else f"{row['answer']} (wrong)",
    ]


def _loaded(row: dict[str, Any], tier: str) -> list[str]:
    kinds = row["report"]["bytes"][tier]
    return [tier, *(human_bytes(kinds[kind]) if kind in kinds else "-" for kind in _KINDS)]
