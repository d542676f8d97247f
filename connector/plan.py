"""What to do with a hit: pure decisions, no I/O, no tensors.

`plan_fetch` decides boundary, mode, checkpoint, tail and the order of loading, `plan_repair` how a
tail's boundary gets its exact state, `plan_put` what is worth sending back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.connector.tail_figures import tails_within
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tailreplay.connector.policy import CachePolicy

CONV_ROWS = 3
"""Rows replayed in front of the tail, so that conv windows inside it see real inputs."""

UsedMode = Literal["exact", "tail", "zero", "off", "miss"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan must know of the model.

    Attributes:
        fa_layers: full-attention layers.
        kv_heads: KV heads of each.
        hidden_sources: FA layers whose hiddens are stored.
        tails_by_group: whether the engine replays a tail of its own length in each group.
    """

    fa_layers: int
    kv_heads: int
    hidden_sources: int
    tails_by_group: bool = False


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """How one prompt is served.

    Attributes:
        mode: what it amounts to.
        exact: whether states and logits equal full prefill within dtype noise.
        matched_tokens: m that could be had, at most the prompt's length - 1.
        used_tokens: boundary that is used; a gap that is prefilled again is part of it.
        prefill_from: first token that the model runs over; below `used_tokens` where the gap is
            prefilled again.
        checkpoint: state to start from; None = zero state.
        replay_first: first row of the hiddens to replay, up to `prefill_from`; None = no replay.
        replay_firsts: the same for each replay group, where they differ; else empty.
        budget: relative error of the states that the tails were chosen for; None if for none.
        tail_wanted: the longest tail that the error figures ask for; None where they were not
            read, or are not known.
        ranges: what to load, in order.
        late_ranges: how many of them, at the end, nothing waits for before the first token.
        lost: tokens of the match that are not used, by reason.
    """

    mode: UsedMode
    exact: bool
    matched_tokens: int
    used_tokens: int = 0
    prefill_from: int = 0
    checkpoint: StoredCheckpoint | None = None
    replay_first: int | None = None
    replay_firsts: tuple[int, ...] = ()
    budget: float | None = None
    tail_wanted: int | None = None
    ranges: tuple[pb.Range, ...] = ()
    late_ranges: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)

    @property
    def checkpoint_token(self) -> int:
        """Tokens that the state to start from has seen."""
        return self.checkpoint.token if self.checkpoint is not None else 0

    @property
    def replayed_tokens(self) -> int:
        """Rows run through the linear layers to rebuild states; a mean over the groups."""
        if self.replay_first is None:
            return 0
        firsts = self.replay_firsts or (self.replay_first,)
        return self.prefill_from - sum(firsts) // len(firsts)

    @property
    def recomputed_tokens(self) -> int:
        """Matched tokens that are prefilled again."""
        return self.used_tokens - self.prefill_from

    def ranges_of(self, kind: Kind) -> list[int]:
        """Numbers of the ranges of a kind, in order."""
        return [number for number, wanted in enumerate(self.ranges) if int(wanted.kind) == kind]


def plan_fetch(
    stored: StoredPrefix, prompt_tokens: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """Decides how a prompt of `prompt_tokens` tokens is served from what is stored."""
    if policy.mode == "off":
        return FetchPlan("off", True, 0)
    matched = max(0, min(stored.matched_tokens, prompt_tokens - 1))
    if matched == 0:
        return FetchPlan("miss", True, 0)
    usable = min(matched, stored.kv_tokens)
    lost = _lost_kv(stored, matched, usable)
    if usable == 0:
        return FetchPlan("miss", True, matched, lost=lost)
    plan = _MODES[policy.mode](stored, usable, policy, shape)
    return replace(plan, matched_tokens=matched, lost=_added(plan.lost, lost))


def plan_repair(stored: StoredPrefix, boundary: int, shape: ModelShape) -> FetchPlan | None:
    """How the exact state at an approximate hit's boundary is rebuilt; None where it can not be.

    From the nearest checkpoint, or from the first token, by hiddens; nothing else is loaded.
    """
    behind = [c for c in stored.checkpoints if c.token < boundary]
    checkpoint = behind[-1] if behind else None
    start = checkpoint.token if checkpoint is not None else 0
    if not shape.hidden_sources or not stored.has_hidden(start, boundary):
        return None
    plan = FetchPlan(
        "exact",
        True,
        boundary,
        used_tokens=boundary,
        prefill_from=boundary,
        checkpoint=checkpoint,
        replay_first=start,
    )
    return replace(plan, ranges=(*_state_ranges(plan), *_hidden_ranges(plan, shape)))


def plan_put(
    stored: StoredPrefix, prompt_tokens: int, computed_from: int
) -> Iterator[tuple[Kind, int, int]]:
    """Blocks of a prompt that the store lacks, as (kind, first token, end token), early ones first.

    Args:
        stored: what the store had before the prompt ran.
        prompt_tokens: n.
        computed_from: first token whose hiddens the engine has, itself or loaded.
    """
    for first in range(0, prompt_tokens, KV_BLOCK_TOKENS):
        end = min(first + KV_BLOCK_TOKENS, prompt_tokens)
        if end > min(stored.kv_tokens, stored.matched_tokens):
            yield Kind.KV, first, end
        for page in range(first, end, PAGE_TOKENS):
            page_end = min(page + PAGE_TOKENS, end)
            if page >= computed_from and not stored.has_hidden(page, page_end):
                yield Kind.HIDDEN, page, page_end


def prefill_cuts(first: int, prompt_tokens: int, chunk_tokens: int, keep: int) -> list[int]:
    """Where a prefill of [first, prompt_tokens) is cut; a checkpoint is kept at each cut.

    Cuts are the chunk grid, the last page boundary before the end, and `keep` (the hit boundary)
    if it lies inside.
    """
    grid = range((first // chunk_tokens + 1) * chunk_tokens, prompt_tokens, chunk_tokens)
    last_page = (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    return sorted(cut for cut in {*grid, last_page, keep} if first < cut < prompt_tokens)


def _plan_exact(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """Nearest checkpoint, and the gap up to the boundary closed exactly."""
    behind = [c for c in stored.checkpoints if c.token <= usable]
    checkpoint = behind[-1] if behind else None
    start = checkpoint.token if checkpoint is not None else 0
    gap = usable - start
    lost = {}
    if gap > policy.max_replay_tokens:
        lost = {"gap_too_long" if behind else "no_checkpoint": gap}
        usable, gap = start, 0
    if usable == 0:
        return FetchPlan("miss", True, 0, lost=lost)
    replay = gap > policy.max_reprefill_tokens and stored.has_hidden(start, usable)
    prefill_from = usable if replay or not gap else start
    plan = FetchPlan(
        "exact",
        True,
        0,
        used_tokens=usable,
        prefill_from=prefill_from,
        checkpoint=checkpoint,
        replay_first=start if replay else None,
        lost=lost,
    )
    return _with_ranges(plan, stored, shape)


def _plan_tail(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """States from the last rows of hiddens alone, at the largest boundary that has them."""
    boundary = _tail_boundary(stored, usable, policy) if shape.hidden_sources else usable
    lost = {"hidden_missing": usable - boundary} if boundary < usable else {}
    if boundary == 0:
        return FetchPlan("miss", True, 0, lost=lost)
    rows = tail_rows(boundary, policy)
    plan = FetchPlan(
        "tail",
        rows == boundary,
        0,
        used_tokens=boundary,
        prefill_from=boundary,
        replay_first=boundary - rows,
        lost=lost,
    )
    return _with_ranges(plan, stored, shape)


def _plan_auto(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """Exact where that is no more work than the tail that keeps to the error budget; else that.

    Exact, if need be at a smaller boundary, also where such a tail is not known, not stored or
    longer than what may be replayed.
    """
    exact = _plan_exact(stored, usable, policy, shape)
    if exact.used_tokens == usable and not exact.replayed_tokens:
        return exact
    tail = _plan_within_budget(stored, usable, policy, shape)
    if tail is None:
        wanted = tails_within(stored.figures_at(usable), policy.error_budget)
        return replace(exact, tail_wanted=max(wanted) if wanted else None)
    as_far = exact.used_tokens >= tail.used_tokens
    if as_far and exact.replayed_tokens + exact.recomputed_tokens <= tail.replayed_tokens:
        return replace(exact, tail_wanted=tail.tail_wanted)
    return tail


def _plan_within_budget(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan | None:
    """A tail that the error figures say will do, at the largest boundary that has one."""
    for first, end in reversed(stored.hidden):
        boundary = min(end, usable)
        tails = tails_within(stored.figures_at(boundary), policy.error_budget)
        if tails is None or boundary <= first:
            continue
        rows = [_with_conv(max(tail, policy.min_tail_tokens), boundary) for tail in tails]
        by_group = shape.tails_by_group and len(rows) - shape.hidden_sources in (0, 1)
        if not by_group:
            rows = [max(rows)]
        stored_rows = rows[-shape.hidden_sources :]
        if max(tails) > policy.max_replay_tokens or boundary - max(stored_rows) < first:
            continue
        plan = FetchPlan(
            "tail",
            min(rows) == boundary,
            0,
            used_tokens=boundary,
            prefill_from=boundary,
            replay_first=boundary - max(rows),
            replay_firsts=tuple(boundary - k for k in rows) if by_group else (),
            budget=policy.error_budget,
            tail_wanted=max(tails),
            lost={"hidden_missing": usable - boundary} if boundary < usable else {},
        )
        return _with_ranges(plan, stored, shape)
    return None


def _plan_zero(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    del policy
    plan = FetchPlan("zero", False, 0, used_tokens=usable, prefill_from=usable)
    return _with_ranges(plan, stored, shape)


_MODES = {"exact": _plan_exact, "tail": _plan_tail, "auto": _plan_auto, "zero": _plan_zero}


def tail_rows(boundary: int, policy: CachePolicy) -> int:
    """Rows to replay for a tail at `boundary`: k plus the conv's, at most all.

    Source: arXiv 2608.30310, k = ceil(r * m); k_min and the rows for the conv are ours.
    """
    tail = max(math.ceil(policy.replay_ratio * boundary), policy.min_tail_tokens)
    return _with_conv(tail, boundary)


def _with_conv(tail: int, boundary: int) -> int:
    return min(boundary, tail + CONV_ROWS)


def _tail_boundary(stored: StoredPrefix, usable: int, policy: CachePolicy) -> int:
    """Largest boundary, at most `usable`, whose tail of hiddens exists; 0 if there is none."""
    for first, end in reversed(stored.hidden):
        boundary = min(end, usable)
        if boundary > first and boundary - tail_rows(boundary, policy) >= first:
            return boundary
    return 0


def _with_ranges(plan: FetchPlan, stored: StoredPrefix, shape: ModelShape) -> FetchPlan:
    """Adds what to load: state, hiddens by source in replay order, then KV layer by layer.

    Last comes what only the write-back needs: the hiddens at the start of the page in which the
    model starts to compute, without which that page could not be stored.
    """
    ranges = [*_state_ranges(plan), *_hidden_ranges(plan, shape)]
    if plan.prefill_from:
        for layer in range(shape.fa_layers):
            first = layer * shape.kv_heads
            ranges.append(_range(Kind.KV, 0, plan.prefill_from, first=first, units=shape.kv_heads))
    page = plan.prefill_from // PAGE_TOKENS * PAGE_TOKENS
    late = 0
    if (
        plan.exact
        and page < plan.prefill_from
        and shape.hidden_sources
        and stored.has_hidden(page, plan.prefill_from)
        and (plan.replay_first is None or plan.replay_first > page)
    ):
        ranges.append(_range(Kind.HIDDEN, page, plan.prefill_from))
        late = 1
    return replace(plan, ranges=tuple(ranges), late_ranges=late)


def _state_ranges(plan: FetchPlan) -> Iterator[pb.Range]:
    if plan.checkpoint is not None:
        end, name = plan.checkpoint.token, plan.checkpoint.prefix_hash
        yield _range(Kind.CHECKPOINT, end - 1, end, prefix_hash=name)


def _hidden_ranges(plan: FetchPlan, shape: ModelShape) -> Iterator[pb.Range]:
    if plan.replay_first is None:
        return
    one_first = (plan.replay_first,) * shape.hidden_sources
    firsts = plan.replay_firsts[-shape.hidden_sources :] or one_first
    for source in range(shape.hidden_sources):
        yield _range(Kind.HIDDEN, firsts[source], plan.prefill_from, first=source, units=1)


def _range(
    kind: Kind, start: int, end: int, *, first: int = 0, units: int = 0, prefix_hash: bytes = b""
) -> pb.Range:
    return pb.Range(
        kind=pb.Kind.ValueType(kind),
        first_token=start,
        end_token=end,
        first_unit=first,
        units=units,
        prefix_hash=prefix_hash,
    )


def _lost_kv(stored: StoredPrefix, matched: int, usable: int) -> dict[str, int]:
    """Reasons for matched tokens beyond those with exact keys and values."""
    inexact = min(stored.inexact_tokens, matched - usable)
    reasons = {"provenance": inexact, "kv_missing": matched - usable - inexact}
    return {reason: tokens for reason, tokens in reasons.items() if tokens}


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {reason: a.get(reason, 0) + b.get(reason, 0) for reason in {**a, **b}}
