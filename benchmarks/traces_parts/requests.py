"""Prompts of recorded workloads, as token ids that have every prefix relation of the originals."""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DATA = Path(__file__).parent / "data"
TRACES = {"tau": "tau_airline_gpt4o.seg.jsonl.gz", "magentic": "magagent.seg.jsonl.gz"}
"""Traces by name; data/PROVENANCE.md says where they come from."""

_SEGMENT_BITS = 20


def prompts(trace: str, sessions_at_once: int) -> Iterator[NDArray[np.uint64]]:
    """The prompts of a trace, `[T]` each, in the order in which they reach a store.

    Args:
        trace: one of TRACES.
        sessions_at_once: how many sessions take turns; the next one starts when one ends. A trace
            with times keeps its own order.
    """
    with gzip.open(_DATA / TRACES[trace], "rt") as file:
        records = [json.loads(line) for line in file]
    records = [record for record in records if "segs" in record]
    if records[0]["t"] is None:
        records = _in_turn(records, sessions_at_once)
    return (_tokens(record["segs"]) for record in records)


def _in_turn(records: Sequence[Any], at_once: int) -> list[Any]:
    sessions: dict[int, list[Any]] = {}
    for record in records:
        sessions.setdefault(record["session"], []).append(record)
    lanes: list[list[Any]] = [[] for _ in range(at_once)]
    for session in sessions.values():
        min(lanes, key=len).extend(session)
    return [record for turn in zip_longest(*lanes) for record in turn if record is not None]


def _tokens(segments: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
    """Token i of segment s is a number of its own; equal segments have equal tokens."""
    parts = [(s << _SEGMENT_BITS) + np.arange(n, dtype=np.uint64) for s, n in segments]
    return np.concatenate(parts)
