"""What to do with a hit: pure decisions, no I/O, no tensors.

`plan_fetch` decides boundary, mode, checkpoint, tail and the order of loading, `plan_repair` how a
tail's boundary gets its exact state, `plan_put` what is worth sending back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.connector.fetch_plan import (
    FetchPlan,
    ModelShape,
    hidden_ranges,
    state_ranges,
    with_ranges,
)
from tailreplay.connector.stored import StoredPrefix
from tailreplay.connector.tail_figures import tails_within
from tailreplay.connector.tail_plan import plan_tail, plan_tail_within
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tailreplay.connector.policy import CachePolicy

FORGOTTEN_WITHIN = 0.5
"""Part of the gap within which states must have forgotten all but `FORGOTTEN` for `auto` to replay
a tail of it.

A longer tail spares little, and says that the states still hold what is far back. There even a
tenth of error in them costs answers.

Measured: of a miniature that keeps its needles in its states, 10 of the 13 tails that were shorter
than .75 of the prefix lost some, at an error of .1; the shortest was .58 of it.
"""

FORGOTTEN = 0.1
"""Relative error of the states that counts as having forgotten, whatever error is allowed."""


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


def unless_all_is_computed(plan: FetchPlan, stored: StoredPrefix, shape: ModelShape) -> FetchPlan:
    """The plan; or, if every token of it would be prefilled again, one that spares something.

    That is a replay from the first token, as far as hiddens go, or else a miss (`no_checkpoint`):
    for engines that keep the state at the boundary in a plain prefill, too.
    """
    if not plan.used_tokens or plan.ranges:
        return plan
    used = plan.used_tokens
    if shape.hidden_sources:
        used = min(used, next((end for first, end in stored.hidden if first == 0), 0))
    if not used:
        lost = _added(plan.lost, {"no_checkpoint": plan.used_tokens})
        return FetchPlan("miss", True, plan.matched_tokens, lost=lost)
    lost = {"hidden_missing": plan.used_tokens - used} if used < plan.used_tokens else {}
    replay = replace(
        plan,
        used_tokens=used,
        prefill_from=used,
        replay_first=0,
        lost=_added(plan.lost, lost),
    )
    return with_ranges(replay, stored, shape)


def plan_repair(stored: StoredPrefix, boundary: int, shape: ModelShape) -> FetchPlan | None:
    """How the exact state at an approximate hit's boundary is rebuilt; None where it can not be.

    From the nearest checkpoint, or from the first token: by hiddens, or by tokens that attend to
    the keys and values which the hit has loaded. Nothing else is loaded.
    """
    behind = [c for c in stored.checkpoints if c.token < boundary]
    checkpoint = behind[-1] if behind else None
    start = checkpoint.token if checkpoint is not None else 0
    from_tokens = not shape.hidden_sources or not stored.has_hidden(start, boundary)
    if from_tokens and not shape.replays_tokens:
        return None
    plan = FetchPlan(
        "exact",
        True,
        boundary,
        used_tokens=boundary,
        prefill_from=boundary,
        checkpoint=checkpoint,
        replay_first=start,
        from_tokens=from_tokens,
    )
    return replace(plan, ranges=(*state_ranges(plan), *hidden_ranges(plan, shape)))


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


def prefill_cuts(first: int, prompt_tokens: int, chunk_tokens: int, keep: int | None) -> list[int]:
    """Where a prefill of [first, prompt_tokens) is cut; a checkpoint is kept at each cut.

    Cuts are the chunk grid, the last page boundary before the end, and `keep` (the hit boundary)
    if it lies inside; the grid alone where nothing is kept (None).
    """
    grid = range((first // chunk_tokens + 1) * chunk_tokens, prompt_tokens, chunk_tokens)
    if keep is None:
        return list(grid)
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
    return with_ranges(plan, stored, shape)


def _plan_auto(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """A tail that keeps to the error budget, where the states have long forgotten the rest.

    Else exact, if need be at a smaller boundary; also where such a tail is not known or not stored.
    A gap that may be prefilled again anyway is not looked at.
    """
    exact = _plan_exact(stored, usable, policy, shape)
    short = exact.recomputed_tokens <= policy.max_reprefill_tokens
    if exact.used_tokens == usable and not exact.replayed_tokens and short:
        return exact
    tail = plan_tail_within(stored, usable, policy, shape)
    if tail is None:
        wanted = tails_within(stored.figures_at(usable), policy.error_budget)
        return replace(exact, tail_wanted=max(wanted) if wanted else None)
    gap = tail.used_tokens - exact.checkpoint_token
    held = _longest_tail(tail, stored, policy)
    if tail.used_tokens >= exact.used_tokens and held < FORGOTTEN_WITHIN * gap:
        return tail
    return replace(exact, tail_wanted=tail.tail_wanted)


def _longest_tail(tail: FetchPlan, stored: StoredPrefix, policy: CachePolicy) -> int:
    """Tokens that the states still hold, as far as the figures know, and at least what is replayed.

    All of them where that is not known.
    """
    figures = stored.figures_at(tail.used_tokens)
    held = tails_within(figures, min(FORGOTTEN, policy.error_budget)) or (tail.used_tokens,)
    return max(*held, tail.used_tokens - (tail.replay_first or 0))


def _plan_zero(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    del policy
    plan = FetchPlan("zero", False, 0, used_tokens=usable, prefill_from=usable)
    return with_ranges(plan, stored, shape)


_MODES = {"exact": _plan_exact, "tail": plan_tail, "auto": _plan_auto, "zero": _plan_zero}


def _lost_kv(stored: StoredPrefix, matched: int, usable: int) -> dict[str, int]:
    """Reasons for matched tokens beyond those with exact keys and values."""
    inexact = min(stored.inexact_tokens, matched - usable)
    reasons = {"provenance": inexact, "kv_missing": matched - usable - inexact}
    return {reason: tokens for reason, tokens in reasons.items() if tokens}


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {reason: a.get(reason, 0) + b.get(reason, 0) for reason in {**a, **b}}
