"""What the demo asks: facts in the opening of a novel, and questions that a reader understands."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from tailreplay.connector.demo_text import Tokenizer, tidy

if TYPE_CHECKING:
    from collections.abc import Sequence

_FACTS = {
    " Emma": 42,
    " Harriet": 17,
    " Knightley": 63,
    " Darcy": 29,
    " Jane": 71,
}
_ELSEWHERE = 6000
"""Where in the novel the text between a boundary and a question is from."""


@dataclass(frozen=True)
class Context:
    """A text with facts in it, and where prompts leave it.

    Attributes:
        model: which of the miniatures reads it.
        tokens: of the whole of it.
        shared: how many of them the prompts share.
        suffix: tokens a prompt has behind those.
        first: place of the first fact.
        apart: tokens from one fact to the next.
    """

    model: str
    tokens: int
    shared: int
    suffix: int
    first: int
    apart: int


LONG = Context("retrieval", 4000, 3217, 24, 150, 380)
SHORT = Context("state", 250, 237, 12, 20, 40)
"""The other miniature has learned to keep facts over no more than 256 tokens."""


class Questions:
    """Contexts and prompts as token ids, and answers as text."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load()
        text = files("tailreplay.connector").joinpath("data/pride_and_prejudice.txt")
        self._book = self._tokenizer.encode(tidy(text.read_text(encoding="utf-8")))
        self._forks = 0

    def context(self, context: Context) -> list[int]:
        """The novel's opening with ` Emma = 42;` and the like in it."""
        ids, at = list(self._book), context.first
        for name, number in _FACTS.items():
            ids[at:at] = self._tokenizer.encode(f"{name} = {number};")
            at += context.apart
        return ids[: context.tokens]

    def prompt(self, context: Context, name: str = " Harriet") -> list[int]:
        """A prompt that leaves the context with a token of its own, and ends in a question."""
        self._forks += 1
        question = self._tokenizer.encode(f"\n{name} is")
        more = context.suffix - 1 - len(question)
        # The novel has no such numbers, so every prompt differs from all others at once.
        own = self._tokenizer.encode(f" {99 - self._forks}")
        filler = self._book[_ELSEWHERE : _ELSEWHERE + more]
        return [*self.context(context)[: context.shared], *own, *filler, *question]

    def said(self, tokens: Sequence[int]) -> str:
        """The first word of an answer."""
        return self._tokenizer.decode(tokens[:1])

    @staticmethod
    def right(name: str = " Harriet") -> str:
        """The right answer."""
        return f" {_FACTS[name]}"
