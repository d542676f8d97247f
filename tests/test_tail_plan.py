"""A tail is as long as the figures ask for, where it is stored, and less work than all else."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import (
    BY_GROUP,
    SHAPE,
    TOKENS_TOO,
    at,
    figures_of,
    policies,
    prompts,
    shapes,
    stored_prefixes,
)

from tailreplay.connector.plan import plan_fetch
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredPrefix
from tailreplay.connector.tail_figures import pack, tails_within
from tailreplay.connector.tail_plan import HIDDEN_ROW_WORK, TOKENS_ERROR, tail_rows
from tailreplay.store.objects import Kind


@given(stored_prefixes(), prompts, policies, shapes)
def test_auto_never_uses_less_than_exact_nor_works_more_for_as_much(stored, prompt, policy, shape):
    exact, auto = (
        plan_fetch(stored, prompt, policy.model_copy(update={"mode": mode}), shape)
        for mode in ("exact", "auto")
    )
    assert auto.used_tokens >= exact.used_tokens
    if auto.used_tokens == exact.used_tokens:
        assert auto.replayed_tokens + auto.recomputed_tokens <= (
            exact.replayed_tokens + exact.recomputed_tokens
        )
    if auto.mode == "tail":
        gap = auto.used_tokens - exact.checkpoint_token
        assert 2 * (auto.used_tokens - auto.replay_first) < gap
        forgotten = tails_within(stored.figures_at(auto.used_tokens), min(0.1, policy.error_budget))
        assert 2 * max(forgotten) < gap
    else:
        assert replace(auto, tail_wanted=None) == exact


@given(stored_prefixes(), prompts, policies, shapes)
def test_a_tail_of_auto_is_what_the_figures_ask_for_within_the_budget(
    stored, prompt, policy, shape
):
    plan = plan_fetch(stored, prompt, policy.model_copy(update={"mode": "auto"}), shape)
    if plan.mode != "tail":
        return
    budget = policy.error_budget / (TOKENS_ERROR if plan.from_tokens else 1)
    tails = tails_within(stored.figures_at(plan.used_tokens), budget)
    assert plan.tail_wanted == max(tails) <= policy.max_replay_tokens
    firsts = plan.replay_firsts or [plan.replay_first] * len(tails)
    assert len(firsts) == len(tails)
    for first, tail in zip(firsts, tails, strict=True):
        asked = max(tail, policy.min_tail_tokens) + 3
        assert first == max(0, plan.used_tokens - asked) or plan.replay_firsts == ()
        assert first <= max(0, plan.used_tokens - asked)
    assert plan.replay_first == min(firsts)


def at_boundary(m, *tails, checkpoints=()):
    return StoredPrefix(
        m, b"leaf", m, 0, ((0, m),), tuple(at(t) for t in checkpoints), {m: figures_of(*tails)}
    )


def auto(**changes):
    return CachePolicy(mode="auto", **changes)


def test_each_group_has_a_tail_of_its_own_where_the_engine_can():
    stored = at_boundary(1000, 300, 70, 80)
    plan = plan_fetch(stored, 1001, auto(), BY_GROUP)
    assert (plan.mode, plan.exact) == ("tail", False)
    assert plan.replay_firsts == (697, 927, 917)
    assert [r.first_token for r in plan.ranges if int(r.kind) == Kind.HIDDEN] == [927, 917]
    assert plan.replayed_tokens == 1000 - (697 + 927 + 917) // 3
    one = plan_fetch(stored, 1001, auto(), SHAPE)
    assert (one.replay_first, one.replay_firsts, one.replayed_tokens) == (697, (), 303)


def test_a_state_that_forgets_nothing_is_rebuilt_whole_or_missed_but_not_from_a_tail():
    stored = at_boundary(1000, 50, 1000, 50)
    whole = plan_fetch(stored, 1001, auto(), SHAPE)
    assert (whole.mode, whole.exact, whole.replayed_tokens) == ("exact", True, 1000)
    assert whole.tail_wanted == 1000
    missed = plan_fetch(stored, 1001, auto(max_replay_tokens=999), SHAPE)
    assert (missed.mode, missed.lost) == ("miss", {"no_checkpoint": 1000})
    assert missed.tail_wanted == 1000


def test_without_figures_auto_is_exact():
    stored = replace(at_boundary(3000, 50, 50, 50), tail_figures={})
    assert plan_fetch(stored, 3001, auto(), SHAPE).mode == "miss"
    assert plan_fetch(stored, 3001, CachePolicy(mode="tail"), SHAPE).mode == "tail"


@pytest.mark.parametrize(("checkpoint", "mode"), [(2193, "tail"), (2194, "exact"), (2700, "exact")])
def test_auto_takes_a_tail_only_where_it_is_less_than_half_of_the_gap(checkpoint, mode):
    """A tail of 400 and the conv's 3, at 3000."""
    stored = at_boundary(3000, 400, 400, 400, checkpoints=[checkpoint])
    plan = plan_fetch(stored, 3001, auto(), SHAPE)
    assert (plan.mode, plan.used_tokens) == (mode, 3000)


def test_a_tail_of_half_the_prefix_is_a_miss_where_exact_may_not_go_as_far():
    """Its length says that the states hold what is far back, whatever exact may replay."""
    for tail, mode in ((1496, "tail"), (1497, "miss")):
        plan = plan_fetch(at_boundary(3000, tail), 3001, auto(), SHAPE)
        assert (plan.mode, plan.tail_wanted) == (mode, tail)


def test_what_states_hold_is_told_by_the_figures_for_a_tenth_whatever_is_allowed():
    """Heads that hold .3 of a prefix's start in a tail of a third of it can hold its needles."""
    for tenth, mode in ((499, "tail"), (500, "exact")):
        by_budget = pack(np.array([[80, 90, 100], [300, tenth, 900]]))
        stored = StoredPrefix(1000, b"leaf", 1000, 0, ((0, 1000),), (), {1000: by_budget})
        plan = plan_fetch(stored, 1001, auto(error_budget=0.3), SHAPE)
        assert (plan.mode, plan.tail_wanted) == (mode, 300)


def test_a_boundary_short_of_the_page_with_the_figures_has_none():
    stored = at_boundary(640, 50, 50, 50)
    assert stored.figures_at(577) == stored.figures_at(640) != b""
    assert stored.figures_at(576) == stored.figures_at(641) == b""


@given(stored_prefixes(), prompts, policies)
def test_tail_takes_the_largest_boundary_whose_tail_is_stored(stored, prompt, policy):
    policy = policy.model_copy(update={"mode": "tail"})
    plan = plan_fetch(stored, prompt, policy, SHAPE)
    usable = min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    tails = (b for b in range(usable, 0, -1) if stored.has_hidden(b - tail_rows(b, policy), b))
    assert plan.used_tokens == next(tails, 0)


@given(stored_prefixes(), prompts, policies)
def test_an_engine_that_replays_tokens_never_does_more_work_for_a_tail(stored, prompt, policy):
    policy = policy.model_copy(update={"mode": "tail"})
    usable = min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    work = []
    for shape in (SHAPE, replace(SHAPE, replays_tokens=True)):
        plan = plan_fetch(stored, prompt, policy, shape)
        row = 1 if plan.from_tokens else HIDDEN_ROW_WORK
        work.append(usable - plan.used_tokens + row * plan.replayed_tokens)
    assert work[1] <= work[0]


def test_a_tail_without_hiddens_is_of_tokens_unless_it_would_be_the_whole_prefix():
    bare = StoredPrefix(1000, b"leaf", 1000)
    how = CachePolicy(mode="tail")
    plan = plan_fetch(bare, 1001, how, TOKENS_TOO)
    assert (plan.mode, plan.exact, plan.used_tokens) == ("tail", False, 1000)
    assert (plan.replay_from, plan.replayed_tokens) == ("tokens", 67)
    assert [Kind(r.kind) for r in plan.ranges] == [Kind.KV] * SHAPE.fa_layers
    short = plan_fetch(bare, 68, how, TOKENS_TOO)
    assert (short.mode, short.lost) == ("miss", {"hidden_missing": 67})
    assert plan_fetch(bare, 1001, how, BY_GROUP).lost == {"hidden_missing": 1000}


@pytest.mark.parametrize(("end", "rows"), [(974, "hiddens"), (973, "tokens")])
def test_a_boundary_with_hiddens_is_taken_where_that_is_less_work(end, rows):
    """67 rows of hiddens and 26 tokens of prefill are as much as 67 rows of tokens, or less."""
    stored = StoredPrefix(1000, b"leaf", 1000, 0, ((0, end),))
    plan = plan_fetch(stored, 1001, CachePolicy(mode="tail"), TOKENS_TOO)
    assert plan.replay_from == rows
    assert plan.used_tokens == (end if rows == "hiddens" else 1000)


def test_auto_asks_for_a_smaller_error_of_a_tail_of_tokens():
    by_budget = pack(np.array([[100, 200, 400]]))
    stored = StoredPrefix(1000, b"leaf", 1000, 0, (), (), {1000: by_budget})
    for budget, rows in ((0.3, 203), (0.1, 403)):
        plan = plan_fetch(stored, 1001, auto(error_budget=budget), TOKENS_TOO)
        assert (plan.mode, plan.replay_from, plan.replayed_tokens) == ("tail", "tokens", rows)
        assert plan.budget == budget
    assert plan_fetch(stored, 1001, auto(error_budget=0.03), TOKENS_TOO).mode == "exact"
    assert plan_fetch(stored, 1001, auto(max_replay_tokens=399), TOKENS_TOO).mode == "miss"
    near = replace(stored, checkpoints=(at(700),))
    assert plan_fetch(near, 1001, auto(), TOKENS_TOO).mode == "exact"


@given(st.integers(1, 100_000), policies)
def test_a_tail_is_a_part_of_the_boundary_and_never_shorter_than_the_least(boundary, policy):
    rows = tail_rows(boundary, policy)
    assert min(boundary, policy.min_tail_tokens) <= rows <= boundary
    assert rows >= min(boundary, math.ceil(policy.replay_ratio * boundary))
