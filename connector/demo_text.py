"""How the miniatures read text: greedy longest match over a fixed list of byte strings.

1. `tidy` undoes the hard line breaks of the source text (paragraphs stay apart).
2. A regular expression cuts the text into pieces: a word, a number of one or two digits, or a run
   of punctuation, each with the space before it; or white space.
3. Each piece is cut into the longest tokens that `vocab.json` holds, from the left.

Every byte is a token, so `decode(encode(text)) == text` for any text.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 0
"""Id of the token that separates documents; it stands for no bytes."""

PIECE = re.compile(r" ?[A-Za-z]+| ?\d{1,2}|\n+| ?[^\sA-Za-z\d]+|\s")


class Tokenizer:
    """Turns text into token ids and back; immutable, safe to share between threads."""

    def __init__(self, words: Sequence[str]) -> None:
        """Builds the table: id 0 ends a document, 1 to 256 are the bytes, then `words`."""
        self.tokens = [b"", *(bytes([b]) for b in range(256)), *(w.encode() for w in words)]
        self.ids = {token: i for i, token in enumerate(self.tokens) if i != END}
        self.longest = max(map(len, self.tokens))
        self._piece_ids = lru_cache(maxsize=1 << 16)(self._match)

    @classmethod
    def load(cls) -> Tokenizer:
        """Reads the list of words that ships with the miniatures."""
        words = files("tailreplay.connector").joinpath("data/vocab.json")
        return cls(json.loads(words.read_text(encoding="utf-8")))

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no token is added before or after."""
        return [i for piece in PIECE.findall(text) for i in self._piece_ids(piece)]

    def decode(self, ids: Sequence[int]) -> str:
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
