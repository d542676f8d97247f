"""How the miniatures read text: greedy longest match over a fixed list of byte strings.

1. `tidy` undoes the hard line breaks of the source text (paragraphs stay apart).
2. A regular expression cuts the text into pieces: a word, a number of one or two digits, or a run
   of punctuation, each with the space before it; or white space.
3. Each piece is cut into the longest tokens that `vocab.json` holds, from the left.

Every byte is a token, so `decode(encode(text)) == text` for any text.
"""

import json
import re
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

END = 0
"""Id of the token that separates documents; it stands for no bytes."""

NUMBERS = [f" {n}" for n in range(10, 100)]
"""The values of the recall tasks, one token each."""

_PIECE = re.compile(r" ?[A-Za-z]+| ?\d{1,2}|\n+| ?[^\sA-Za-z\d]+|\s")
_VOCAB = Path(__file__).with_name("vocab.json")


class Tokenizer:
    """Turns text into token ids and back; immutable, safe to share between threads."""

    def __init__(self, words: list[str]) -> None:
        """Builds the table: id 0 ends a document, 1 to 256 are the bytes, then `words`."""
        self.tokens = [b"", *(bytes([b]) for b in range(256)), *(w.encode() for w in words)]
        self.ids = {token: i for i, token in enumerate(self.tokens) if i != END}
        self.longest = max(map(len, self.tokens))
        self._piece_ids = lru_cache(maxsize=1 << 16)(self._match)

    @classmethod
    def load(cls, path: Path = _VOCAB) -> "Tokenizer":
        """Reads the list of words the project ships."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no token is added before or after."""
        return [i for piece in _PIECE.findall(text) for i in self._piece_ids(piece)]

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")

    def _match(self, piece: str) -> tuple[int, ...]:
        rest, found = piece.encode(), []
        while rest:
            size = next(n for n in range(self.longest, 0, -1) if rest[:n] in self.ids)
            found.append(self.ids[rest[:size]])
            rest = rest[size:]
        return tuple(found)


def tidy(text: str) -> str:
    """Joins the lines of each paragraph and drops the underscores that mark italics."""
    paragraphs = re.split(r"\n\s*\n", text.replace("_", "").replace("\r", ""))
    return "\n".join(" ".join(p.split()) for p in paragraphs if p.strip()) + "\n"


def learn_words(text: str, size: int) -> list[str]:
    """The `size - 257` words of a vocabulary of `size`: the numbers, " =", then learned merges.

    Source: byte-pair encoding (Sennrich et al. 2016), over the pieces of `text`.
    """
    counts = Counter(_PIECE.findall(text))
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
