"""What a store holds of one prompt: a Match answer, read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailreplay.connector.tail_figures import are_figures
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A state the store has.

    Attributes:
        token: tokens it has seen.
        prefix_hash: its name.
    """

    token: int
    prefix_hash: bytes


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """What a store holds of one prompt; only exact payload counts.

    Attributes:
        matched_tokens: longest stored prefix, not yet cut to the prompt.
        leaf: names the path.
        kv_tokens: tokens from 0 on whose exact keys and values exist without a hole.
        inexact_tokens: tokens after those whose keys and values exist but are approximate.
        hidden: ascending, disjoint spans [first, end) of tokens whose exact hiddens exist.
        checkpoints: exact states, ascending by token.
        tail_figures: of a tail that ends at a token, or in that token's page.
        in_redis: what of it lies in Redis alone, as (kind, first token, end token).
        mismatches: parts of the answer that were not what they must be, and are left out.
    """

    matched_tokens: int
    leaf: bytes = b""
    kv_tokens: int = 0
    inexact_tokens: int = 0
    hidden: tuple[tuple[int, int], ...] = ()
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    tail_figures: Mapping[int, bytes] = field(default_factory=dict)
    in_redis: tuple[tuple[int, int, int], ...] = ()
    mismatches: int = 0

    def figures_at(self, token: int) -> bytes:
        """Tail figures of a tail that ends at `token`; empty where there are none."""
        for end, figures in self.tail_figures.items():
            if 0 < token <= end and _page(token) == _page(end):
                return figures
        return b""

    def has_hidden(self, first: int, end: int) -> bool:
        """Whether the hiddens of [first, end) exist."""
        return first >= end or any(a <= first and end <= b for a, b in self.hidden)

    def slowest_tier(self, ranges: Iterable[pb.Range]) -> str:
        """Where the slowest part of some ranges lies, 'cpu' or 'redis'."""
        spans = [(int(r.kind), r.first_token, r.end_token) for r in ranges]
        reaches_redis = any(
            kind == other and first < end and begin < stop
            for kind, begin, end in self.in_redis
            for other, first, stop in spans
        )
        return "redis" if reaches_redis else "cpu"


NOTHING = StoredPrefix(0)


def stored_prefix(answer: pb.MatchResponse) -> StoredPrefix:
    """Reads a Match answer."""
    exact = pb.PROVENANCE_EXACT
    kv = [(r.first_token, r.end_token) for r in answer.runs if _is(r, Kind.KV, exact)]
    hidden = [(r.first_token, r.end_token) for r in answer.runs if _is(r, Kind.HIDDEN, exact)]
    any_kv = [(r.first_token, r.end_token) for r in answer.runs if int(r.kind) == Kind.KV]
    kv_tokens = _covered(kv)
    told = {r.end_token: r.tail_figures for r in answer.runs if r.tail_figures}
    figures = {end: some for end, some in told.items() if are_figures(some)}
    return StoredPrefix(
        answer.matched_tokens,
        answer.leaf,
        kv_tokens,
        _covered(any_kv) - kv_tokens,
        tuple(_merged(hidden)),
        tuple(
            StoredCheckpoint(c.token, c.prefix_hash)
            for c in answer.checkpoints
            if c.provenance == exact
        ),
        figures,
        tuple(_in_redis(answer)),
        len(told) - len(figures),
    )


def _in_redis(answer: pb.MatchResponse) -> Iterator[tuple[int, int, int]]:
    for run in answer.runs:
        if run.tier == pb.TIER_REDIS:
            yield int(run.kind), run.first_token, run.end_token
    for state in answer.checkpoints:
        if state.tier == pb.TIER_REDIS:
            yield int(Kind.CHECKPOINT), state.token - 1, state.token


def _page(token: int) -> int:
    """The page in which a prefix of `token` tokens ends."""
    return (token - 1) // PAGE_TOKENS


def _is(run: pb.Run, kind: Kind, provenance: pb.Provenance.ValueType) -> bool:
    return int(run.kind) == kind and run.provenance == provenance


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """Tokens from 0 on that spans cover without a hole."""
    merged = _merged(spans)
    return merged[0][1] if merged and merged[0][0] == 0 else 0


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and merged[-1][1] >= first:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((first, end))
    return merged
