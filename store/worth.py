"""Which objects of a prefix are worth their bytes, once something has been stored of it.

An exact hit needs keys and values, one state, and the hiddens between that state and the boundary.
Most hits are at the end of what was stored last, or where other prompts have parted before. So

- a state behind which a later one of the same prefix lies has been superseded, unless it was
  fetched more than once: then prompts part there;
- hiddens far before the end are of use only if somebody starts between two states there, unless
  they were ever fetched, or the prefix has no state at all and hiddens are all there is.

`benchmarks/traces.py` compares this with plain least-recently-used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.store.record import Record
    from tailreplay.store.views import Match, Path

WINDOW_TOKENS = 256
"""Hiddens so near the end of a prefix are worth as much as its keys and values."""


def by_worth(found: Match, path: Path) -> tuple[list[Record], list[Record]]:
    """Objects of a stored prefix: those worth keeping, and those of least worth.

    Args:
        found: the prefix.
        path: its objects.
    """
    states = found.checkpoints
    superseded = {state for state in states[:-1] if state.fetches < 2}
    window = found.matched_tokens - WINDOW_TOKENS
    far = {page for page in path.hidden if states and page.end_token <= window and not page.fetches}
    least = superseded | far
    everything = [*states, *path.hidden, *path.kv]
    return [r for r in everything if r not in least], [r for r in everything if r in least]
