"""Two plots, written as SVG: scores against replay ratio, |delta logprob| against distance."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from quality_parts.columns import RATIOS
from quality_parts.tables import TEXT

_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d6a9f", "#e09f3e", "#444444", "#00a6a6", "#9a031e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_W, _PLOT_H = 760, 380, 60, 40, 440, 280

Line = tuple[str, list[tuple[float, float]]]


def plots(models: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Pictures by name."""
    return {
        "ratio": _picture(
            "score as a part of full, against replay ratio (0 = zeroed states)",
            list(_ratio_lines(models)),
            [(i, t) for i, t in enumerate(["0", *(f"{100 * r:g}%" for r in RATIOS)])],
            [(y / 5, f"{y / 5:.1f}") for y in range(6)],
        ),
        "distance": _picture(
            "mean |delta logprob| in nats on natural text, against tokens behind the boundary",
            list(_distance_lines(models)),
            [(i, str(2**i)) for i in range(0, 9, 2)],
            [(y, f"1e{y}") for y in range(-8, 2, 2)],
        ),
    }


def _ratio_lines(models: dict[str, list[dict[str, Any]]]) -> Iterator[Line]:
    columns = ["zero", *(f"tail {100 * r:g}%" for r in RATIOS)]
    for model, rows in _in_fp32(models):
        for row in rows:
            if row["tokens"] == "all" and row["task"] in (
                "needles in text",
                "needles packed",
                "common words",
                TEXT,
            ):
                parts = [row["columns"][column]["of_full"][0] for column in columns]
                if not any(map(math.isnan, parts)):  # what full can not do, no other way can keep
                    yield f"{model}: {row['task']}", list(enumerate(parts))


def _distance_lines(models: dict[str, list[dict[str, Any]]]) -> Iterator[Line]:
    for model, rows in _in_fp32(models):
        texts = [row for row in rows if (row["task"], row["tokens"]) == (TEXT, "all")]
        for text, column in product(texts, ("zero", "tail 5%", "tail 20%", "exact")):
            buckets = text["columns"][column]["by_distance"]
            yield (
                f"{model}: {column}",
                [
                    (math.log2(sum(b["tokens"]) / 2), math.log10(max(b["mean"][0], 1e-8)))
                    for b in buckets
                ],
            )


def _in_fp32(models: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    return ((name, rows) for name, rows in models.items() if not name.endswith("bf16"))


def _picture(
    title: str,
    lines: list[Line],
    x_ticks: list[tuple[float, str]],
    y_ticks: list[tuple[float, str]],
) -> str:
    low_x, high_x = x_ticks[0][0], x_ticks[-1][0]
    low_y, high_y = y_ticks[0][0], y_ticks[-1][0]

    def x_of(x: float) -> float:
        return _LEFT + _PLOT_W * (x - low_x) / (high_x - low_x)

    def y_of(y: float) -> float:
        return _TOP + _PLOT_H * (high_y - min(y, high_y)) / (high_y - low_y)

    parts = [_text(_LEFT, 22, title)]
    bottom, right = _TOP + _PLOT_H, _LEFT + _PLOT_W
    for x, label in x_ticks:
        parts.append(_text(x_of(x), bottom + 18, label, "middle"))
    for y, label in y_ticks:
        parts.append(f'<path d="M{_LEFT} {y_of(y):.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y_of(y) + 4, label, "end"))
    for number, (label, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 12 + 20 * number
        parts.append(
            f'<path d="M{right + 14} {y - 4}h18" stroke="{colour}" stroke-width="3"/>'
            + _text(right + 38, y, label)
        )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
