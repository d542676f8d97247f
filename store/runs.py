"""Run-length coding of what exists along a path, straight from the columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tailreplay.store.blocks import NONE, PAGES
from tailreplay.store.objects import PAGE_TOKENS, Kind, Provenance
from tailreplay.store.record import APPROXIMATE, EXISTS, IN_CPU

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from tailreplay.store.blocks import Blocks
    from tailreplay.store.object_rows import Objects


class Run(NamedTuple):
    """Tokens [first_token, end_token) of one kind, all in one tier with one provenance.

    The tail figures are those of the page in which it ends, whether or not its hiddens still exist.
    """

    kind: Kind
    first_token: int
    end_token: int
    in_cpu: bool
    provenance: Provenance
    tail_figures: bytes = b""


def runs_along(
    blocks: Blocks, objects: Objects, path: Sequence[int], matched: int
) -> tuple[Run, ...]:
    """What exists of a path's first `matched` tokens, by kind, then by first token."""
    if not path:
        return ()
    rows = np.array(path)
    kv = np.frombuffer(blocks.kv, np.int32)[rows]
    pages = np.frombuffer(blocks.pages, np.int32).reshape(-1, PAGES)[rows].ravel()
    return tuple(
        run._replace(tail_figures=_figures(objects, pages, run.end_token))
        for run in (
            *_runs_of(Kind.KV, objects, kv, matched),
            *_runs_of(Kind.HIDDEN, objects, pages[pages != NONE], matched),
        )
    )


def _figures(objects: Objects, pages: npt.NDArray[np.int32], end: int) -> bytes:
    """Of the page in which a prefix of `end` tokens ends; none that are not exact."""
    row = int(pages[(end - 1) // PAGE_TOKENS])
    if row == NONE or objects.states[row] & APPROXIMATE:
        return b""
    return objects.figures(row)


def _runs_of(
    kind: Kind, objects: Objects, rows: npt.NDArray[np.int32], matched: int
) -> Iterator[Run]:
    states = np.frombuffer(objects.states, np.uint8)[rows]
    firsts = np.frombuffer(objects.firsts, np.int32)[rows]
    ends = firsts + np.frombuffer(objects.lengths, np.uint16)[rows]
    there = (states & EXISTS != 0) & (firsts < matched)
    rows, states, firsts, ends = rows[there], states[there], firsts[there], ends[there]
    if not len(states):
        return
    # Redis too or not: what is in the CPU tier is served from there.
    alike = states & (IN_CPU | APPROXIMATE)
    breaks = np.flatnonzero((alike[1:] != alike[:-1]) | (firsts[1:] != ends[:-1])) + 1
    starts = [0, *breaks.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(states)], strict=True):
        state = int(alike[start])
        provenance = Provenance.APPROXIMATE if state & APPROXIMATE else Provenance.EXACT
        end = min(int(ends[stop - 1]), matched)
        yield Run(kind, int(firsts[start]), end, bool(state & IN_CPU), provenance)
