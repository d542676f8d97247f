"""Work on many things, some at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")


def batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """All of them in their order, `most` at a time; the last may be fewer."""
    for at in range(0, len(items), most):
        yield items[at : at + most]
