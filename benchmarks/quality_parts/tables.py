"""The report as Markdown tables."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

TEXT = "natural text"


def tables(name: str, rows: list[Row]) -> Iterator[str]:
    """Lines of one miniature's tables; rows of all lengths have 95% intervals."""
    totals = [row for row in rows if row["tokens"] == "all"]
    contexts = max(row["contexts"] for row in rows if row["tokens"] != "all")
    yield f"#### `{name}`: {contexts} contexts a row\n"
    yield "Scores by way of serving, all lengths:\n"
    yield from _by_way(totals)
    yield "\nAnswers that are not the ones full gives (of text, top tokens; Wilson), all lengths:\n"
    yield from _differ(totals)
    yield "\nScores by task and length:\n"
    yield from _table([row for row in rows if row not in totals], _score)
    yield "\nRows replayed per matched token:\n"
    yield from _table(rows, lambda c: _number(c["replayed"]))
    for text in (row for row in totals if row["task"] == TEXT):
        yield "\nHeld-back text: 16 greedy tokens all as in full; KL from full, nats a token:\n"
        yield from _table([text], lambda c: _with_bounds(c["kept"]))
        yield from list(_table([text], lambda c: f"{c['kl'][0]:.2g}"))[2:]
        yield "\n\\|delta logprob\\| of the true next token, nats, mean (99th percentile):\n"
        yield from _distance(text["columns"])


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


def _table(rows: list[Row], figure: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """A row for each task and length, a column for each way: the layout of the paper's Table 3."""
    names = list(rows[0]["columns"]) if rows else []
    yield f"| task | tokens | n | {' | '.join(names)} |"
    yield "|---|---|---|" + "---|" * len(names)
    for row in rows:
        cells = " | ".join(figure(row["columns"][name]) for name in names)
        yield f"| {row['task']} | {row['tokens']} | {row['answers']} | {cells} |"


def _distance(columns: dict[str, Any]) -> Iterator[str]:
    names = [name for name in columns if name != "full"]
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
