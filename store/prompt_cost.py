"""What an exact engine computes of a prompt that leaves what is stored at some token."""

from __future__ import annotations

from typing import NamedTuple

from tailreplay.proto import store_pb2 as pb

LONGEST_PREFILLED_GAP = 256
"""An engine's default of `max_reprefill_tokens`: a gap up to this is prefilled again anyway."""

LONGEST_REPLAYED_GAP = 2048
"""An engine's default of `max_replay_tokens`: a longer gap is not closed."""


class PromptCost(NamedTuple):
    """What a prompt costs.

    Attributes:
        from_checkpoint: tokens of the checkpoint that the engine goes on from; 0 = none, the
            beginning.
        to_replay: tokens behind it whose stored hiddens are replayed.
        to_prefill: tokens that are computed.
    """

    from_checkpoint: int
    to_replay: int
    to_prefill: int


def prompt_cost(answer: pb.MatchResponse, shared: int, total: int) -> PromptCost:
    """Counts as an engine with default settings plans it in mode `exact`.

    Args:
        answer: what the store has of the prompt; only what is exact counts.
        shared: tokens of it that may be used; what is stored behind them does not count.
        total: tokens of the prompt; the last is computed in any case.
    """
    shared = max(0, min(shared, answer.matched_tokens, total - 1, _reach(answer, pb.KIND_KV, 0)))
    states = (c.token for c in answer.checkpoints if c.provenance == pb.PROVENANCE_EXACT)
    start = max((token for token in states if token <= shared), default=0)
    gap = shared - start
    replayable = LONGEST_PREFILLED_GAP < gap <= LONGEST_REPLAYED_GAP
    if replayable and _reach(answer, pb.KIND_HIDDEN, start) >= shared:
        return PromptCost(start, gap, total - shared)
    return PromptCost(start, 0, total - start)


def _reach(answer: pb.MatchResponse, kind: pb.Kind.ValueType, start: int) -> int:
    """Up to which token exact runs of a kind go on from `start` without a hole."""
    exact = pb.PROVENANCE_EXACT
    runs = (r for r in answer.runs if (r.kind, r.provenance) == (kind, exact))
    for first, end in sorted((r.first_token, r.end_token) for r in runs):
        if first <= start:
            start = max(start, end)
    return start
