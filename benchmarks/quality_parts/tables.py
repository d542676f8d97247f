"""The report as Markdown tables."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

TEXT = "natural text"


def tables(name: str, rows: list[Row]) -> Iterator[str]:
    """Lines of one miniature's tables; rows of all lengths have 95% intervals."""
    asked = [row for row in rows if row["task"] != TEXT]
    totals = [row for row in rows if row["tokens"] == "all"]
    text = [row for row in rows if row["task"] == TEXT]
    yield f"**`{name}`: share of answers found**\n"
    yield from _table(asked, lambda c: c["score"])
    yield f"\n**`{name}`: score as a part of full's, paired**\n"
    yield from _table([row for row in totals if _found(row)], lambda c: c["of_full"])
    yield f"\n**`{name}`: answers that are not what full gives** (Wilson intervals)\n"
    yield from _table([row for row in asked if row in totals], lambda c: c["differ_share"])
    yield f"\n**`{name}`: continuations in the form of an answer**\n"
    yield from _table([row for row in totals if "needles" in row["task"]], lambda c: c["kept"])
    yield f"\n**`{name}`: rows replayed per matched token**\n"
    yield from _table(totals, lambda c: (c["replayed"],))
    yield f"\n**`{name}`: natural text, top token as in full**\n"
    yield from _table(text, lambda c: c["score"])
    yield f"\n**`{name}`: natural text, 16 greedy tokens all as in full**\n"
    yield from _table(text, lambda c: c["kept"])
    yield f"\n**`{name}`: natural text, KL from full, nats a token**\n"
    yield from _table(text, lambda c: (c["kl"][0],), "{:.2g}")
    yield f"\n**`{name}`: natural text, |delta logprob| in nats by distance, mean (p99)**\n"
    yield from _distance(text[-1]["columns"])


def _found(row: Row) -> bool:
    """Whether full finds anything, so that a part of it means something."""
    return row["columns"]["full"]["score"][0] > 0.1


def _table(
    rows: list[Row], figure: Callable[[dict[str, Any]], tuple[float, ...]], form: str = "{:.3f}"
) -> Iterator[str]:
    names = list(rows[0]["columns"]) if rows else []
    yield f"| task | tokens | answers | {' | '.join(names)} |"
    yield "|---|---|---|" + "---|" * len(names)
    for row in rows:
        figures = [figure(row["columns"][name]) for name in names]
        bounds = row["tokens"] == "all"
        cells = " | ".join(form.format(f[0]) + (_bounds(f) if bounds else "") for f in figures)
        yield f"| {row['task']} | {row['tokens']} | {row['answers']} | {cells} |"


def _bounds(figure: tuple[float, ...]) -> str:
    return f" ({figure[1]:.3f}-{figure[2]:.3f})" if len(figure) == 3 else ""


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
