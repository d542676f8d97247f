"""The miniatures' tokenizer, which ships with the demo, and how its words were learned."""

from collections import Counter, defaultdict
from itertools import pairwise

from tailreplay.connector.demo_text import PIECE, Tokenizer, tidy

__all__ = ["NUMBERS", "Tokenizer", "learn_words", "tidy"]

NUMBERS = [f" {n}" for n in range(10, 100)]
"""The values of the recall tasks, one token each."""


def learn_words(text: str, size: int) -> list[str]:
    """The `size - 257` words of a vocabulary of `size`: the numbers, " =", then learned merges.

    Source: byte-pair encoding (Sennrich et al. 2016), over the pieces of `text`.
    """
    counts = Counter(PIECE.findall(text))
    words = {piece: [chr(b) for b in piece.encode()] for piece in counts}
    pairs: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[str]] = defaultdict(set)
    for piece, parts in words.items():
        _count(parts, counts[piece], pairs)
        for pair in pairwise(parts):
            where[pair].add(piece)
    learned = [*NUMBERS, " ="]
    seen = set(learned)
    while len(learned) < size - 257:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        for piece in where.pop(best):
            _count(words[piece], -counts[piece], pairs)
            words[piece] = _merge(words[piece], best)
            _count(words[piece], counts[piece], pairs)
            for pair in pairwise(words[piece]):
                where[pair].add(piece)
        del pairs[best]
        word = "".join(best).encode("latin-1").decode("utf-8", errors="replace")
        if "\ufffd" not in word and word not in seen:
            seen.add(word)
            learned.append(word)
    return learned


def _count(parts: list[str], times: int, pairs: Counter[tuple[str, str]]) -> None:
    for pair in pairwise(parts):
        pairs[pair] += times


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged
