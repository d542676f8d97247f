"""Plans are never inexact unasked, never beyond what is stored, and account for every token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import (
    BY_GROUP,
    MOST,
    SHAPE,
    TOKENS_TOO,
    at,
    policies,
    prompts,
    shapes,
    stored_prefixes,
)

from tailreplay.connector.plan import (
    plan_fetch,
    plan_put,
    plan_repair,
    prefill_cuts,
    unless_all_is_computed,
)
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import NOTHING, StoredPrefix
from tailreplay.store.objects import Kind


def ranges_of(plan, kind):
    return [r for r in plan.ranges if int(r.kind) == kind]


@given(stored_prefixes(), prompts, policies, shapes)
def test_every_matched_token_is_used_or_lost_for_a_reason(stored, prompt, policy, shape):
    plan = plan_fetch(stored, prompt, policy, shape)
    matched = 0 if policy.mode == "off" else min(stored.matched_tokens, prompt - 1)
    assert plan.matched_tokens == matched == plan.used_tokens + sum(plan.lost.values())
    assert all(tokens > 0 for tokens in plan.lost.values())
    assert set(plan.lost) <= {
        "kv_missing",
        "provenance",
        "no_checkpoint",
        "gap_too_long",
        "hidden_missing",
    }


@given(stored_prefixes(), prompts, policies, shapes)
def test_the_last_token_of_a_prompt_is_always_computed(stored, prompt, policy, shape):
    plan = plan_fetch(stored, prompt, policy, shape)
    assert 0 <= plan.prefill_from <= plan.used_tokens <= prompt - 1
    assert plan.recomputed_tokens >= 0
    assert plan.replayed_tokens >= 0


@given(stored_prefixes(), prompts, policies, shapes)
def test_nothing_is_loaded_beyond_the_boundary_or_what_exists(stored, prompt, policy, shape):
    plan = plan_fetch(stored, prompt, policy, shape)
    for wanted in plan.ranges:
        assert 0 <= wanted.first_token < wanted.end_token <= plan.prefill_from
    for wanted in ranges_of(plan, Kind.KV):
        assert (wanted.first_token, wanted.end_token) == (0, plan.prefill_from)
        assert wanted.end_token <= stored.kv_tokens
    for wanted in ranges_of(plan, Kind.HIDDEN):
        assert stored.has_hidden(wanted.first_token, wanted.end_token)
    for wanted in ranges_of(plan, Kind.CHECKPOINT):
        assert wanted.end_token - wanted.first_token == 1
        assert wanted.end_token == plan.checkpoint.token
        assert wanted.prefix_hash == plan.checkpoint.prefix_hash


@given(stored_prefixes(), prompts, policies, shapes)
def test_all_state_that_the_model_runs_on_has_a_source(stored, prompt, policy, shape):
    """Zero states only where the mode says so, or where no token precedes."""
    plan = plan_fetch(stored, prompt, policy, shape)
    start = plan.prefill_from if plan.replay_first is None else plan.replay_first
    if plan.mode == "zero":
        assert policy.mode == "zero"
        return
    if plan.mode == "tail":
        assert plan.replayed_tokens >= min(plan.used_tokens, 4)
        assert plan.exact == (plan.replay_first == 0)
    else:
        assert plan.exact
        assert start == plan.checkpoint_token
    for layer in range(shape.fa_layers if plan.prefill_from else 0):
        kv = ranges_of(plan, Kind.KV)[layer]
        assert (kv.first_unit, kv.units) == (layer * shape.kv_heads, shape.kv_heads)
    if plan.from_tokens:
        assert (plan.mode, plan.exact, plan.replay_firsts) == ("tail", False, ())
        assert shape.replays_tokens
        assert ranges_of(plan, Kind.HIDDEN) == []
        assert plan.used_tokens == min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    elif plan.replay_first is not None:
        replayed = ranges_of(plan, Kind.HIDDEN)[: shape.hidden_sources]
        assert [r.first_unit for r in replayed] == list(range(shape.hidden_sources))
        firsts = plan.replay_firsts or [plan.replay_first] * shape.hidden_sources
        wanted = [(first, plan.prefill_from) for first in firsts]
        spans = [(r.first_token, r.end_token) for r in replayed]
        assert spans == wanted[len(wanted) - shape.hidden_sources :]


@given(stored_prefixes(), prompts, policies, shapes)
def test_state_comes_first_then_hiddens_then_kv_then_what_only_the_write_back_needs(
    stored, prompt, policy, shape
):
    plan = plan_fetch(stored, prompt, policy, shape)
    needed = plan.ranges[: len(plan.ranges) - plan.late_ranges]
    order = [Kind.CHECKPOINT, Kind.HIDDEN, Kind.KV]
    keys = [(order.index(Kind(r.kind)), r.first_unit) for r in needed]
    assert keys == sorted(keys)
    late = plan.ranges[len(needed) :]
    assert all(int(r.kind) == Kind.HIDDEN and r.units == 0 for r in late)
    assert all(r.first_token % 64 == 0 and r.end_token == plan.prefill_from for r in late)


@given(stored_prefixes(), prompts, policies)
def test_exact_starts_from_the_nearest_exact_checkpoint_that_is_not_ahead(stored, prompt, policy):
    policy = policy.model_copy(update={"mode": "exact"})
    plan = plan_fetch(stored, prompt, policy, SHAPE)
    usable = min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    nearest = max((c.token for c in stored.checkpoints if c.token <= usable), default=0)
    assert plan.checkpoint_token in ({nearest, 0} if plan.mode == "miss" else {nearest})
    if usable - nearest <= policy.max_replay_tokens:
        assert plan.used_tokens == usable
    else:
        assert plan.used_tokens == nearest
        assert plan.lost["gap_too_long" if nearest else "no_checkpoint"] == usable - nearest


def test_the_state_at_a_boundary_is_repaired_from_hiddens_or_from_tokens():
    stored = StoredPrefix(1000, b"leaf", 1000, 0, ((600, 1000),), (at(500), at(700), at(900)))
    near = plan_repair(stored, 800, TOKENS_TOO)
    assert (near.checkpoint, near.replay_from, near.replay_first) == (at(700), "hiddens", 700)
    assert [Kind(r.kind) for r in near.ranges] == [Kind.CHECKPOINT, Kind.HIDDEN, Kind.HIDDEN]
    far = plan_repair(stored, 650, TOKENS_TOO)
    assert (far.checkpoint, far.replay_from, far.replay_first) == (at(500), "tokens", 500)
    assert [Kind(r.kind) for r in far.ranges] == [Kind.CHECKPOINT]
    assert plan_repair(stored, 650, BY_GROUP) is None


@given(stored_prefixes(), prompts, st.integers(0, MOST))
def test_what_is_put_is_what_is_missing_on_the_block_grid_early_blocks_first(
    stored, prompt, computed_from
):
    wanted = list(plan_put(stored, prompt, computed_from))
    assert [first // 256 for _, first, _ in wanted] == sorted(f // 256 for _, f, _ in wanted)
    for kind, first, end in wanted:
        grid = 256 if kind is Kind.KV else 64
        assert first % grid == 0
        assert end == min(first + grid, prompt)
    kv = {end for kind, _, end in wanted if kind is Kind.KV}
    have = min(stored.kv_tokens, stored.matched_tokens)
    ends = [min(first + 256, prompt) for first in range(0, prompt, 256)]
    assert kv == {end for end in ends if end > have}
    for page in range(0, prompt, 64):
        end = min(page + 64, prompt)
        missing = page >= computed_from and not stored.has_hidden(page, end)
        assert ((Kind.HIDDEN, page, end) in wanted) == missing


def test_nothing_is_put_that_a_longer_prompt_has_stored_already():
    stored = StoredPrefix(1000, b"leaf", 1000, 0, ((0, 1000),))
    assert list(plan_put(stored, 1000, 0)) == []
    kinds = [(kind, first) for kind, first, _ in plan_put(stored, 1001, 960)]
    assert kinds == [(Kind.KV, 768), (Kind.HIDDEN, 960)]


@given(
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.integers(64, 2048),
    st.integers(0, 5000),
)
def test_a_prefill_is_cut_at_chunks_the_last_page_and_the_hit_boundary(first, n, chunk, keep):
    cuts = prefill_cuts(first, first + n, chunk, keep)
    total = first + n
    assert cuts == sorted(set(cuts))
    assert all(first < cut < total for cut in cuts)
    assert (keep in cuts) == (first < keep < total)
    last_page = (total - 1) // 64 * 64
    assert (last_page in cuts) == (first < last_page)
    steps = [b - a for a, b in zip([first, *cuts], [*cuts, total], strict=True)]
    assert max(steps) <= chunk
    assert prefill_cuts(first, total, chunk, None) == [cut for cut in cuts if cut % chunk == 0]


def test_a_short_gap_is_prefilled_again_and_a_long_one_is_replayed_where_hiddens_are():
    whole = StoredPrefix(2000, b"leaf", 2000, 0, ((0, 2000),), (at(1024),))
    short = plan_fetch(whole, 1024 + 256 + 1, CachePolicy(), SHAPE)
    assert (short.recomputed_tokens, short.replayed_tokens) == (256, 0)
    long = plan_fetch(whole, 1024 + 257 + 1, CachePolicy(), SHAPE)
    assert (long.recomputed_tokens, long.replayed_tokens) == (0, 257)
    bare = StoredPrefix(2000, b"leaf", 2000, 0, ((0, 1100),), (at(1024),))
    again = plan_fetch(bare, 1024 + 257 + 1, CachePolicy(), SHAPE)
    assert (again.recomputed_tokens, again.replayed_tokens) == (257, 0)


@pytest.mark.parametrize("mode", ["exact", "tail", "auto", "zero", "off"])
def test_an_empty_store_is_a_plain_prefill(mode):
    plan = plan_fetch(NOTHING, 100, CachePolicy(mode=mode), SHAPE)
    assert plan.mode == ("off" if mode == "off" else "miss")
    assert plan.exact
    assert plan.ranges == ()
    assert (plan.matched_tokens, plan.used_tokens, plan.lost) == (0, 0, {})


def test_what_would_all_be_prefilled_again_is_replayed_from_the_start_or_missed():
    """No state, and a gap that may be prefilled: nothing would be spared."""

    def planned(shape=SHAPE, **stored):
        prefix = StoredPrefix(300, b"leaf", 300, **stored)
        plan = plan_fetch(prefix, 201, CachePolicy(), shape)
        assert (plan.used_tokens, plan.recomputed_tokens, plan.ranges) == (200, 200, ())
        return unless_all_is_computed(plan, prefix, shape)

    whole = planned(hidden=((0, 300),))
    assert (whole.mode, whole.used_tokens, whole.replayed_tokens) == ("exact", 200, 200)
    assert whole.recomputed_tokens == 0
    part = planned(hidden=((0, 128), (192, 300)))
    assert (part.used_tokens, part.replayed_tokens) == (128, 128)
    assert part.lost == {"hidden_missing": 72}
    missed = planned(hidden=((64, 300),))
    assert (missed.mode, missed.used_tokens, missed.lost) == ("miss", 0, {"no_checkpoint": 200})
    # The leading group alone needs no hiddens.
    leading = planned(replace(SHAPE, hidden_sources=0))
    assert (leading.used_tokens, leading.replayed_tokens) == (200, 200)


@given(stored_prefixes(), prompts, policies, shapes)
def test_a_plan_that_loads_something_stays_as_it_is(stored, prompt, policy, shape):
    plan = plan_fetch(stored, prompt, policy, shape)
    checked = unless_all_is_computed(plan, stored, shape)
    assert checked.matched_tokens == checked.used_tokens + sum(checked.lost.values())
    if plan.ranges or not plan.used_tokens:
        assert checked is plan
    else:
        assert checked.ranges or checked.mode == "miss"
