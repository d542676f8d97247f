"""Rows of `benchmarks/quality.py` in small: a trained miniature behind an engine and a store."""

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

# At the end, so that nothing in it shadows an installed package.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from mini import forward
from mini import model as minis
from mini.tasks import Corpus
from mini.tokenizer import Tokenizer
from quality_parts.columns import Served, bench
from quality_parts.questions import Prompt, Row, rows, sample
from quality_parts.scores import Scores

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb

__all__ = ["Stateless", "corpus", "figures", "forward", "minis", "prompts_served", "row_of"]


class Stateless(StoreClient):
    """A client whose store has no checkpoints."""

    def match(self, *args: Any, **kwargs: Any) -> pb.MatchResponse:
        """As it is there, but for those."""
        answer = super().match(*args, **kwargs)
        del answer.checkpoints[:]
        return answer


@functools.cache
def corpus() -> Corpus:
    """The texts."""
    return Corpus(Tokenizer.load())


def row_of(task: str, tokens: int) -> Row:
    """The first row of a task at a length."""
    return next(row for row in rows((tokens,)) if row.task == task)


def prompts_served(
    name: str, task: str, tokens: int, columns: tuple[str, ...]
) -> list[tuple[Prompt, dict[str, Served]]]:
    """One context's prompts, each with what every column gave."""
    context, prompts = sample(corpus(), row_of(task, tokens), np.random.default_rng(3), 1)
    with bench(name) as served:
        return list(zip(prompts, served.serve(context, prompts, columns), strict=True))


def figures(
    name: str, task: str, tokens: int, columns: tuple[str, ...], contexts: int = 1
) -> dict[str, Any]:
    """A row of the report, by column; one boundary a context."""
    rng, scores = np.random.default_rng(3), Scores(row_of(task, tokens))
    with bench(name) as served:
        for _ in range(contexts):
            context, prompts = sample(corpus(), scores.row, rng, 1)
            scores.add(Tokenizer.load(), prompts, served.serve(context, prompts, columns))
    found: dict[str, Any] = scores.as_dict()["columns"]
    return found
