"""Prompts with their answers: a context that one replica prefills, and what another then asks.

A question shares the first m tokens of a context and then goes its own way; what it asks for stands
in those m tokens. The questions before the last are given with their answers, so one prompt is
judged at several places; the answer to the last is generated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from mini.tasks import TASKS, Corpus, Ids, Load

QUESTIONS = 16
"""Answers judged per prompt, where as many can be asked."""

HOPS = 2
"""Links of a chain behind its first."""

AHEAD = 256
"""Tokens of natural text judged behind a boundary."""

GREEDY = 16
"""Tokens generated right behind a boundary of natural text."""

_BLOCK = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt and where it is judged.

    Attributes:
        ids: the prompt.
        m: tokens it shares with its context.
        places: indices i into `ids[m:]` at which token i + 1 is an answer; the last one is the
            prompt's end, whose answer is generated. Empty for natural text.
        answers: the token that is right at each place, and further ones in what is generated, at
            every second token.
        new_tokens: how many to generate.
    """

    ids: list[int]
    m: int
    places: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    new_tokens: int = 1


@dataclass(frozen=True)
class Row:
    """A row of the tables: a task at a length."""

    title: str
    task: str
    tokens: int
    load: Load


def rows(lengths: tuple[int, ...]) -> Iterator[Row]:
    """Every task at every length, natural text last."""
    for n in lengths:
        keys = max(4, n // 32)
        yield Row("needles in text", "needles", n, Load(0, keys, QUESTIONS))
        yield Row("needles packed", "needles", n, Load(0, 0, QUESTIONS, packed=True))
        yield Row("tracking", "track", n, Load(0, keys, QUESTIONS, hops=HOPS))
        yield Row("common words", "common", n, Load(0, 0, 1))
        yield Row("natural text", "text", n, Load(0, 0, 0))


def sample(
    corpus: Corpus, row: Row, rng: np.random.Generator, boundaries: int
) -> tuple[list[int], list[Prompt]]:
    """A context and prompts that share different numbers of its tokens, none block-aligned."""
    if row.task == "text":
        m = _unaligned(rng, row.tokens - 64, row.tokens)
        ids = corpus.passage(rng, m + AHEAD + 1, held_back=True).tolist()
        return ids[:m], [Prompt(ids, m), Prompt(ids[: m + 1], m, new_tokens=GREEDY)]
    hops = row.load.hops if row.task == "track" else 0
    tail = 3 if row.task == "common" else 1 + (4 + 2 * hops) * row.load.questions
    load = replace(row.load, length=row.tokens + tail)
    drawn = TASKS[row.task](corpus, rng, load)
    context = drawn.ids[: drawn.boundary]
    prompts: list[Prompt] = []
    while len(prompts) < boundaries:
        m = _unaligned(rng, len(context) // 2, len(context))
        if context[m] == corpus.line:  # the question's first token: it would share one more
            continue
        if row.task == "common" or _facts(corpus, context[:m], row.task):
            prompts.append(_asked(corpus, row, rng, context, m))
    return context.tolist(), prompts


def _asked(corpus: Corpus, row: Row, rng: np.random.Generator, context: Ids, m: int) -> Prompt:
    prefix = context[:m]
    if row.task == "common":
        counts = np.bincount(prefix)
        tail, answers = [corpus.line, corpus.most, corpus.asks], [int(counts.argmax())]
        return Prompt([*prefix.tolist(), *tail], m, (len(tail) - 1,), tuple(answers))
    known = _facts(corpus, prefix, row.task)
    keys = rng.choice(list(known), min(QUESTIONS, len(known)), replace=False).tolist()
    tail, places, answers = [corpus.line], [], []
    for key in keys:
        at = len(tail)
        for name in [key, *known[key]]:
            tail += [name, corpus.asks]
        tail[-1] = corpus.ends
        places += range(at + 1, len(tail) - 2, 2)
        answers += known[key]
    walk = len(known[keys[-1]])
    del tail[at + 2 :]
    del places[len(places) - walk + 1 :]
    ids = [*prefix.tolist(), *tail]
    return Prompt(ids, m, tuple(places), tuple(answers), new_tokens=2 * walk - 1)


def _facts(corpus: Corpus, prefix: Ids, task: str) -> dict[int, list[int]]:
    """What can be asked of a prefix, with its answers; of chains only links that need a hop."""
    ids = prefix.tolist()
    verbs = [i for i, token in enumerate(ids[:-2]) if token == corpus.equals and i]
    said = {ids[i - 1]: ids[i + 1] for i in verbs if ids[i + 2] == corpus.ends}
    if task != "track":
        return {key: [value] for key, value in said.items()}
    return {key: _walk(said, key) for key, source in said.items() if source in said}


def _walk(said: dict[int, int], key: int) -> list[int]:
    walk = []
    while key in said:
        key = said[key]
        walk.append(key)
    return walk


def _unaligned(rng: np.random.Generator, low: int, high: int) -> int:
    """A number in [low, high) that is no multiple of a block."""
    m = int(rng.integers(low, high))
    return m if m % _BLOCK else m + 1 if m + 1 < high else m - 1
