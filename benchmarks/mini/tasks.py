"""Samples to train and score on: natural text, and recall tasks written in its vocabulary.

| task | what stands in the prefix | what is asked after it |
|---|---|---|
| needles | ` Emma = 42;` with many keys, in text or packed | ` Emma is` -> ` 42` |
| track | ` Emma = 42; Anne = Emma; Jane = Anne;` | ` Jane is` -> ` Anne is Emma is 42` |
| common | a list of words, one of them six times as often as the others | ` most is` -> the word |
| copy | random words | the same words again |
| text | a passage | the rest of it |

Every sample has exactly `length` tokens, of which `boundary` are the prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mini.tokenizer import NUMBERS, Tokenizer, tidy

Ids = NDArray[np.int64]

HOME = Path(__file__).parent
NOVELS = (HOME / "emma.txt", HOME / "pride_and_prejudice.txt")
HELD_BACK = 0.05
"""Share of each text, its end, that no training sample touches."""

_RECORD = 4


class Sample(NamedTuple):
    """One row: what the model reads and where it is judged."""

    ids: Ids
    """`[T]`."""
    answer: NDArray[np.bool_]
    """`[T]`, true at the tokens that are answers (to be predicted from the token before)."""
    text: NDArray[np.bool_]
    """`[T]`, true at tokens of natural text."""
    boundary: int
    """First token of the question."""


@dataclass(frozen=True)
class Load:
    """How hard a recall task is."""

    length: int
    keys: int
    questions: int
    hops: int = 1
    packed: bool = False
    """Records fill the prefix (as many keys as fit), with no text between them."""
    alphabet: tuple[int, int] = (512, 90)
    """How many words serve as keys, and how many numbers as values."""


class Corpus:
    """The texts as token ids, split into a part for training and a held-back part."""

    def __init__(self, tokenizer: Tokenizer, paths: tuple[Path, ...] = NOVELS) -> None:
        texts = [tidy(path.read_text(encoding="utf-8")) for path in paths]
        parts = [np.array(tokenizer.encode(text), dtype=np.int64) for text in texts]
        cuts = [int(len(part) * (1 - HELD_BACK)) for part in parts]
        self.train = np.concatenate([part[:cut] for part, cut in zip(parts, cuts, strict=True)])
        self.held_back = np.concatenate([part[cut:] for part, cut in zip(parts, cuts, strict=True)])
        self.keys = _whole_words(tokenizer, self.train)
        self.values = np.array([tokenizer.encode(number)[0] for number in NUMBERS])
        self.equals, self.asks, self.ends, self.line, self.most = (
            tokenizer.encode(word)[0] for word in (" =", " is", ";", "\n", " most")
        )

    def passage(self, rng: np.random.Generator, length: int, held_back: bool = False) -> Ids:
        """`length` tokens of natural text from a random place."""
        source = self.held_back if held_back else self.train
        start = rng.integers(0, len(source) - length)
        return source[start : start + length]


def text(corpus: Corpus, rng: np.random.Generator, load: Load) -> Sample:
    """A passage; every token is judged as text."""
    ids = corpus.passage(rng, load.length)
    none = np.zeros(load.length, dtype=bool)
    return Sample(ids, none, ~none, load.length // 2)


def copy(corpus: Corpus, rng: np.random.Generator, load: Load) -> Sample:
    """Random words, then the same words again from a random place on."""
    half = load.length // 2
    words = rng.choice(corpus.keys[: load.alphabet[0]], half)
    start = rng.integers(0, max(1, half // 2))
    again = np.resize(words[start:], load.length - half)
    ids = np.concatenate((words, again))
    answer = np.zeros(load.length, dtype=bool)
    answer[half + 2 : half + half - start] = True
    return Sample(ids, answer, np.zeros_like(answer), half)


def needles(corpus: Corpus, rng: np.random.Generator, load: Load) -> Sample:
    """Keys with values; questions ask distinct keys."""
    room = (load.length - 1 - _RECORD * load.questions) // _RECORD
    words = corpus.keys[: load.alphabet[0]]
    count = min(room if load.packed else load.keys, room, len(words))
    keys = rng.choice(words, count, replace=False)
    values = rng.choice(corpus.values[: load.alphabet[1]], count)
    records = _records(corpus, keys, values, corpus.equals)
    asked = rng.choice(count, min(load.questions, count), replace=False)
    return _row(corpus, rng, load, (records, _records(corpus, keys[asked], values[asked])))


def track(corpus: Corpus, rng: np.random.Generator, load: Load) -> Sample:
    """Chains of variables, each set to the one before; questions walk a chain back to its value.

    As in RULER's variable tracking, every name of the chain is asked for.
    """
    walk = 2 * load.hops + _RECORD
    room = (load.length - 1 - walk * load.questions) // _RECORD
    chains = max(1, min(load.keys, room) // (load.hops + 1))
    names = rng.choice(corpus.keys, (chains, load.hops + 1), replace=False)
    values = rng.choice(corpus.values, chains)
    sources = np.concatenate((values[:, None], names[:, :-1]), 1)
    order = np.argsort(_interleaved(rng, chains, load.hops + 1), kind="stable")
    records = _records(corpus, names.ravel()[order], sources.ravel()[order], corpus.equals)
    asked = rng.choice(chains, min(load.questions, chains), replace=False)
    steps = np.full((len(asked), walk), corpus.asks)
    steps[:, -1] = corpus.ends
    steps[:, :-1:2] = np.concatenate((names[asked, ::-1], values[asked, None]), 1)
    return _row(corpus, rng, load, (records, steps))


def common(corpus: Corpus, rng: np.random.Generator, load: Load) -> Sample:
    """A list of words, one of which stands in it six times as often as any other, or more."""
    room = load.length - 1 - 3
    often = max(6, room // 12)
    count = min(1 + room - often, len(corpus.keys))
    others = rng.choice(corpus.keys, count, replace=False)
    rest = np.resize(others[1:], room - often)
    words = rng.permutation(np.concatenate((np.full(often, others[0]), rest)))
    ids = np.concatenate((words, [corpus.line, corpus.most, corpus.asks, others[0]]))
    answer = np.zeros(load.length, dtype=bool)
    answer[-1] = True
    return Sample(ids, answer, np.zeros_like(answer), room)


TASKS: dict[str, Callable[[Corpus, np.random.Generator, Load], Sample]] = {
    "needles": needles,
    "track": track,
    "common": common,
    "copy": copy,
    "text": text,
}


def _whole_words(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """Tokens that are a whole word of four letters or more, at least 40 times in the text."""
    ends = np.array([not token[:1].isalpha() for token in tokenizer.tokens])
    whole = ends[np.append(ids[1:], tokenizer.encode(" ")[0])]
    counts = np.bincount(ids[whole], minlength=len(tokenizer))
    shape = [t[:1] == b" " and len(t) > 4 and t[1:].isalpha() for t in tokenizer.tokens]
    return np.flatnonzero((counts >= 40) & np.array(shape))


def _records(corpus: Corpus, keys: Ids, values: Ids, verb: int | None = None) -> Ids:
    """`[n, 4]`: key, verb, value, semicolon."""
    verbs = np.full_like(keys, corpus.asks if verb is None else verb)
    return np.stack((keys, verbs, values, np.full_like(keys, corpus.ends)), 1)


def _interleaved(rng: np.random.Generator, chains: int, links: int) -> NDArray[np.float64]:
    """Places of the statements, chain by chain: random, but in order within each chain."""
    return np.sort(rng.random((chains, links)), 1).ravel()


def _row(corpus: Corpus, rng: np.random.Generator, load: Load, parts: tuple[Ids, Ids]) -> Sample:
    """Scatters the records in a passage, puts the questions at the end, marks the answers."""
    records, questions = parts
    tail = np.concatenate(([corpus.line], questions.ravel()))
    room = load.length - len(tail) - records.size
    filler = corpus.passage(rng, room) if room else np.zeros(0, dtype=np.int64)
    places = np.sort(rng.integers(0, room + 1, len(records)))
    if load.packed:
        places[:] = room
    prefix = np.insert(filler, np.repeat(places, _RECORD), records.ravel())
    natural = np.insert(np.ones(room, dtype=bool), np.repeat(places, _RECORD), False)
    answer = np.append(np.zeros(len(prefix) + 1, dtype=bool), tail[:-1] == corpus.asks)
    natural = np.append(natural, np.zeros(len(tail), dtype=bool))
    return Sample(np.concatenate((prefix, tail)), answer, natural, len(prefix))
