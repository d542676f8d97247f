"""States from a tail alone: how long it is, where it ends, and what its rows are.

Rows are hiddens where those are stored. Where they are not, an engine that can runs the tail's
tokens through the whole model against the stored keys and values; that costs more and is further
off, so a boundary a few tokens earlier may be the better one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.connector.fetch_plan import FetchPlan, ModelShape, with_ranges
from tailreplay.connector.tail_figures import tails_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.connector.policy import CachePolicy
    from tailreplay.connector.stored import StoredPrefix

CONV_ROWS = 3
"""Rows replayed in front of the tail, so that conv windows inside it see real inputs."""

HIDDEN_ROW_WORK = 0.6
"""Work of replaying a row of hiddens, as a part of running the model over a token.

Source: FLOPs of state-only replay, .53 to .64 for five model shapes; arXiv 2608.30310, section 3,
for what is left out.
"""

TOKENS_ERROR = 2.7
"""How much further off states are that come from tokens and not from hiddens, on tails of a length.

Measured: 2 to 2.7 times on random weights, 1 to 1.4 on the miniatures.
"""


def plan_tail(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan:
    """States from the last k rows: hiddens at the largest boundary that has them, or tokens."""
    boundary = _tail_boundary(stored, usable, policy) if shape.hidden_sources else usable
    plans = []
    if boundary:
        plans.append(_tail(usable, boundary, [tail_rows(boundary, policy)]))
    if shape.replays_tokens and tail_rows(usable, policy) < usable:
        plans.append(_tail(usable, usable, [tail_rows(usable, policy)], from_tokens=True))
    if not plans:
        return FetchPlan("miss", True, 0, lost={"hidden_missing": usable})
    return with_ranges(_least_work(plans, usable), stored, shape)


def plan_tail_within(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan | None:
    """A tail that the error figures say will do; None where none is known or stored."""
    found = (_hiddens_within(stored, usable, policy, shape), _tokens_within(stored, usable, policy))
    plans = [plan for plan in found if plan is not None]
    if not shape.replays_tokens:
        plans = [plan for plan in plans if not plan.from_tokens]
    return with_ranges(_least_work(plans, usable), stored, shape) if plans else None


def tail_rows(boundary: int, policy: CachePolicy) -> int:
    """Rows to replay for a tail at `boundary`: k plus the conv's, at most all.

    Source: arXiv 2608.30310, k = ceil(r * m); k_min and the rows for the conv are ours.
    """
    tail = max(math.ceil(policy.replay_ratio * boundary), policy.min_tail_tokens)
    return _with_conv(tail, boundary)


def _hiddens_within(
    stored: StoredPrefix, usable: int, policy: CachePolicy, shape: ModelShape
) -> FetchPlan | None:
    """A tail of hiddens within the error budget, at the largest boundary that has one."""
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
        plan = _tail(usable, boundary, rows)
        return replace(plan, budget=policy.error_budget, tail_wanted=max(tails))
    return None


def _tokens_within(stored: StoredPrefix, usable: int, policy: CachePolicy) -> FetchPlan | None:
    """A tail of tokens within the error budget: longer than one of hiddens, the same in each group.

    None also where it would be the whole prefix, which is plain prefill.
    """
    tails = tails_within(stored.figures_at(usable), policy.error_budget / TOKENS_ERROR)
    if tails is None or max(tails) > policy.max_replay_tokens:
        return None
    rows = _with_conv(max(*tails, policy.min_tail_tokens), usable)
    if rows == usable:
        return None
    plan = _tail(usable, usable, [rows], from_tokens=True)
    return replace(plan, budget=policy.error_budget, tail_wanted=max(tails))


def _tail(
    usable: int, boundary: int, rows: Sequence[int], *, from_tokens: bool = False
) -> FetchPlan:
    """A tail at `boundary` of so many rows in each group; one number is for all of them."""
    return FetchPlan(
        "tail",
        min(rows) == boundary,
        0,
        used_tokens=boundary,
        prefill_from=boundary,
        replay_first=boundary - max(rows),
        replay_firsts=tuple(boundary - k for k in rows) if len(rows) > 1 else (),
        from_tokens=from_tokens,
        lost={"hidden_missing": usable - boundary} if boundary < usable else {},
    )


def _least_work(plans: Sequence[FetchPlan], usable: int) -> FetchPlan:
    """The plan that reaches `usable` with the least work; the first of those that are equal."""

    def work(plan: FetchPlan) -> float:
        row = 1.0 if plan.from_tokens else HIDDEN_ROW_WORK
        return usable - plan.used_tokens + row * plan.replayed_tokens

    return min(plans, key=work)


def _with_conv(tail: int, boundary: int) -> int:
    return min(boundary, tail + CONV_ROWS)


def _tail_boundary(stored: StoredPrefix, usable: int, policy: CachePolicy) -> int:
    """Largest boundary, at most `usable`, whose tail of hiddens exists; 0 if there is none."""
    for first, end in reversed(stored.hidden):
        boundary = min(end, usable)
        if boundary > first and boundary - tail_rows(boundary, policy) >= first:
            return boundary
    return 0
