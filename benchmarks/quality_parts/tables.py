"""The report as Markdown tables."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

TEXT = "natural text"


_SCORED = (
    "full",
    "zero",
    "tail 1%",
    "tail 5%",
    "tail 10%",
    "tail 20%",
    "auto",
    "auto .1, no ckpt",
    "auto .3, no ckpt",
    "exact",
)
_REPLAYING = ("tail 5%", "tail 10%", "auto", "auto .1, no ckpt", "auto .3, no ckpt", "exact")


def tables(name: str, rows: list[Row]) -> Iterator[str]:
    """Lines of one miniature's tables; rows of all lengths have 95% intervals.

    Of a single length there are only the tables over all tasks.
    """
    totals = [row for row in rows if row["tokens"] == "all"]
    each = [row for row in rows if row["tokens"] != "all"]
    lengths = {row["tokens"] for row in each}
    where = f", {next(iter(lengths))} tokens" if len(lengths) == 1 else ""
    yield f"#### `{name}`{where}: {max(row['contexts'] for row in each)} contexts a row\n"
    yield "By way of serving, all lengths (of text: top tokens that are full's), 95% intervals:\n"
    yield from _by_way(totals)
    yield "\nAnswers, or top tokens, that are not full's (Wilson):\n"
    yield from _differ(totals)
    if len(lengths) == 1:
        yield ""
        return
    yield "\nBy task and length:\n"
    yield from _table(each, _SCORED, _score)
    yield "\nRows replayed per matched token:\n"
    yield from _table(rows, _REPLAYING, lambda c: _number(c["replayed"]))
    for text in (row for row in totals if row["task"] == TEXT):
        columns = {name: c for name, c in text["columns"].items() if name != "full"}
        yield "\nHeld-back text: 16 greedy tokens all as in full; KL from full, nats a token:\n"
        yield f"| | {' | '.join(columns)} |"
        yield "|---|" + "---|" * len(columns)
        yield f"| greedy | {' | '.join(_with_bounds(c['kept']) for c in columns.values())} |"
        yield f"| KL | {' | '.join(format(c['kl'][0], '.2g') for c in columns.values())} |"
        yield "\n\\|delta logprob\\| of the true next token, nats, mean (99th percentile):\n"
        yield from _distance(text["columns"])
    yield ""


def _by_way(totals: list[Row]) -> Iterator[str]:
    """A row for each way of serving, a column for each task: the layout of the paper's Table 1."""
    titles = [f"{row['task']}, n = {row['answers']}" for row in totals]
    yield f"| states | {' | '.join(titles)} | rows replayed |"
    yield "|---|" + "---|" * (len(titles) + 1)
    for name in totals[0]["columns"]:
        columns = [row["columns"][name] for row in totals]
        cells = " | ".join(_with_bounds(column["score"]) for column in columns)
        replayed = sum(column["replayed"] for column in columns) / len(columns)
        yield f"| {name} | {cells} | {_number(replayed)} |"


def _differ(totals: list[Row]) -> Iterator[str]:
    yield f"| states | {' | '.join(row['task'] for row in totals)} |"
    yield "|---|" + "---|" * len(totals)
    for name in totals[0]["columns"]:
        shares = [row["columns"][name]["differ_share"] for row in totals]
        yield f"| {name} | {' | '.join(_with_bounds(share) for share in shares)} |"


def _table(
    rows: list[Row], wanted: tuple[str, ...], figure: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """A row for each task and length, a column for each way: the layout of the paper's Table 3."""
    names = [name for name in wanted if rows and name in rows[0]["columns"]]
    yield f"| task | tokens | n | {' | '.join(names)} |"
    yield "|---|---|---|" + "---|" * len(names)
    for row in rows:
        cells = " | ".join(figure(row["columns"][name]) for name in names)
        yield f"| {row['task']} | {row['tokens']} | {row['answers']} | {cells} |"


def _distance(columns: dict[str, Any]) -> Iterator[str]:
    names = [name for name in _SCORED if name in columns and name not in ("full", "auto")]
    yield f"| tokens behind | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for number, bucket in enumerate(columns["full"]["by_distance"]):
        cells = [columns[name]["by_distance"][number] for name in names]
        first, last = bucket["tokens"]
        where = str(first) if first == last else f"{first}-{last}"
        figures = " | ".join(f"{c['mean'][0]:.2g} ({c['p99']:.2g})" for c in cells)
        yield f"| {where} | {figures} |"


def _score(column: dict[str, Any]) -> str:
    return _number(column["score"][0])


def _with_bounds(figure: tuple[float, ...]) -> str:
    return f"{_number(figure[0])} ({_number(figure[1])}-{_number(figure[2])})"


def _number(value: float) -> str:
    """Three decimals, no zero in front of the point, 0 and 1 as such."""
    text = f"{value:.3f}"
    return {"0.000": "0", "1.000": "1"}.get(text, text.removeprefix("0")) if value < 1 else text[:1]
