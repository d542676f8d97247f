"""What is counted: answers found, and on natural text how far each column is from full."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from mini.tokenizer import Tokenizer
from numpy.typing import NDArray

from quality_parts.columns import Served
from quality_parts.intervals import bootstrap_mean, bootstrap_ratio, wilson
from quality_parts.questions import AHEAD, Prompt, Row

BUCKETS = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, AHEAD)]
"""Distances from the boundary, first and last token of each bucket; 1 is the first token."""

Values = NDArray[np.float64]


@dataclass
class Counts:
    """Figures of one column of a row; every list has one entry per context.

    Attributes:
        found: answers that are right; on natural text top tokens that are full's.
        differ: answers that are not what full gives.
        kept: of the continuations, those in the form of an answer; on natural text those that are
            full's, token for token.
        replayed: rows replayed per matched token, mean over the context's prompts.
        kl: KL(full || column) in nats, `[AHEAD]`; natural text only.
        dlogprob: |difference of the log-probability of the true token|, `[AHEAD]`; likewise.
    """

    found: list[int] = field(default_factory=list)
    differ: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    kl: list[Values] = field(default_factory=list)
    dlogprob: list[Values] = field(default_factory=list)


@dataclass
class Scores:
    """Figures of one row, gathered context by context.

    Attributes:
        row: what was asked; of 0 tokens when it is all lengths.
        asked: answers judged, by context.
        continued: continuations judged, by context.
        columns: what was counted, by column.
    """

    row: Row
    asked: list[int] = field(default_factory=list)
    continued: list[int] = field(default_factory=list)
    columns: dict[str, Counts] = field(default_factory=dict)

    def add(
        self, tokenizer: Tokenizer, prompts: list[Prompt], served: list[dict[str, Served]]
    ) -> None:
        """Counts one context's prompts, served in every way."""
        text = self.row.task == "text"
        self.asked.append(AHEAD if text else sum(len(p.answers) for p in prompts))
        self.continued.append(1 if text else len(prompts))
        for name in served[0]:
            counts = self.columns.setdefault(name, Counts())
            column, full = [s[name] for s in served], [s["full"] for s in served]
            counts.replayed.append(_replayed(prompts, column))
            if text:
                _add_text(counts, prompts[0], column, full)
            else:
                _add_answers(counts, tokenizer, prompts, column, full)

    def as_dict(self) -> dict[str, Any]:
        """The row for the report."""
        return {
            "task": self.row.title,
            "tokens": self.row.tokens or "all",
            "contexts": len(self.asked),
            "answers": sum(self.asked),
            "columns": {name: self._column(counts) for name, counts in self.columns.items()},
        }

    def _column(self, counts: Counts) -> dict[str, Any]:
        asked, found, full, kept, continued = (
            np.array(v, float)
            for v in (
                self.asked,
                counts.found,
                self.columns["full"].found,
                counts.kept,
                self.continued,
            )
        )
        differ, count = sum(counts.differ), sum(self.asked)
        out: dict[str, Any] = {
            "score": bootstrap_ratio(found, asked),
            "of_full": bootstrap_ratio(found, full),
            "differ": differ,
            "differ_share": (differ / count, *wilson(differ, count)),
            "kept": bootstrap_ratio(kept, continued),
            "replayed": float(np.mean(counts.replayed)),
        }
        if counts.kl:
            kl, delta = np.stack(counts.kl), np.stack(counts.dlogprob)
            out["kl"] = bootstrap_mean(kl.mean(1))
            out["dlogprob"] = bootstrap_mean(delta.mean(1))
            out["by_distance"] = [_bucket(delta, kl, *ends) for ends in BUCKETS]
        return out


def report(scores: list[Scores]) -> list[dict[str, Any]]:
    """Every row, then one of all lengths for each task."""
    titles = dict.fromkeys(one.row.title for one in scores)
    totals = [_pooled([one for one in scores if one.row.title == title]) for title in titles]
    return [one.as_dict() for one in [*scores, *totals]]


def _pooled(scores: list[Scores]) -> Scores:
    together = Scores(replace(scores[0].row, tokens=0))
    for one in scores:
        together.asked += one.asked
        together.continued += one.continued
        for name, counts in one.columns.items():
            into = together.columns.setdefault(name, Counts())
            for key, values in vars(counts).items():
                getattr(into, key).extend(values)
    return together


def is_answer(text: str) -> bool:
    """Whether a continuation has the form of an answer, whatever number it gives: ` 42`."""
    return text[:1] == " " and text[1:].isdigit()


def _add_answers(
    counts: Counts,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    column: list[Served],
    full: list[Served],
) -> None:
    given, wanted = (
        [_given(p, s) for p, s in zip(prompts, x, strict=True)] for x in (column, full)
    )
    right = [list(p.answers) for p in prompts]
    counts.found.append(sum(_same(a, b) for a, b in zip(given, right, strict=True)))
    counts.differ.append(sum(len(a) - _same(a, b) for a, b in zip(given, wanted, strict=True)))
    counts.kept.append(sum(is_answer(tokenizer.decode(s.tokens)) for s in column))


def _add_text(counts: Counts, prompt: Prompt, column: list[Served], full: list[Served]) -> None:
    """Natural text: the first prompt is judged token by token, the second by its continuation."""
    mine, theirs = (x[0].logits[:AHEAD].double().log_softmax(-1) for x in (column, full))
    same = _same(mine.argmax(-1).tolist(), theirs.argmax(-1).tolist())
    truth = torch.tensor(prompt.ids[prompt.m + 1 :])[:, None]
    counts.found.append(same)
    counts.differ.append(AHEAD - same)
    counts.kept.append(int(column[1].tokens == full[1].tokens))
    counts.kl.append((theirs.exp() * (theirs - mine)).sum(-1).clamp(min=0).numpy())
    counts.dlogprob.append((theirs - mine).gather(1, truth).abs()[:, 0].numpy())


def _given(prompt: Prompt, served: Served) -> list[int]:
    """The tokens given where a prompt is judged.

    RULER's metric is whether the reference is a substring of the continuation; references here are
    one token long and stand at a known place, so equality of that token is the same thing.
    """
    top = served.logits.argmax(-1).tolist()
    return [*(top[place] for place in prompt.places[:-1]), *served.tokens[::2]]


def _replayed(prompts: list[Prompt], column: list[Served]) -> float:
    return float(np.mean([_share(p, s.report) for p, s in zip(prompts, column, strict=True)]))


def _share(prompt: Prompt, report: dict[str, Any]) -> float:
    """A miss runs over all of the prefix, as full does."""
    return 1.0 if report["mode"] == "miss" else report["replayed_tokens"] / prompt.m


def _same(a: list[int], b: list[int]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def _bucket(delta: Values, kl: Values, first: int, last: int) -> dict[str, Any]:
    part = delta[:, first - 1 : last]
    return {
        "tokens": [first, last],
        "mean": bootstrap_mean(part.mean(1)),
        "p99": float(np.quantile(part, 0.99)),
        "max": float(part.max()),
        "kl": float(kl[:, first - 1 : last].mean()),
    }
