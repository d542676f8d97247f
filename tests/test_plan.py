"""Plans are never inexact unasked, never beyond what is stored, and account for every token."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.connector.fetch_plan import ModelShape
from tailreplay.connector.plan import (
    plan_fetch,
    plan_put,
    plan_repair,
    prefill_cuts,
    unless_all_is_computed,
)
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import NOTHING, StoredCheckpoint, StoredPrefix, stored_prefix
from tailreplay.connector.tail_figures import pack, tails_within
from tailreplay.connector.tail_plan import HIDDEN_ROW_WORK, TOKENS_ERROR, tail_rows
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import Kind

SHAPE = ModelShape(fa_layers=3, kv_heads=2, hidden_sources=2)
BY_GROUP = replace(SHAPE, tails_by_group=True)
TOKENS_TOO = replace(BY_GROUP, replays_tokens=True)
EXACT, APPROXIMATE = pb.PROVENANCE_EXACT, pb.PROVENANCE_APPROXIMATE
MOST = 3000


def at(token):
    return StoredCheckpoint(token, token.to_bytes(32, "big"))


@st.composite
def spans(draw, most):
    """Ascending, disjoint, non-adjacent spans within `most` tokens."""
    edges = sorted(draw(st.sets(st.integers(0, most), max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


def figures_of(*tails):
    """Figures of replay groups with the same tail for every budget."""
    return pack(np.array([[tail] * 3 for tail in tails]))


figures = st.lists(st.integers(0, 2 * MOST), min_size=1, max_size=4).map(lambda k: figures_of(*k))


@st.composite
def stored_prefixes(draw):
    matched = draw(st.integers(0, MOST))
    kv = draw(st.one_of(st.just(matched), st.integers(0, matched)))
    hidden = draw(st.one_of(st.just(((0, matched),) if matched else ()), spans(matched)))
    return StoredPrefix(
        matched,
        b"leaf",
        kv,
        draw(st.integers(0, matched - kv)),
        hidden,
        tuple(at(t) for t in sorted(draw(st.sets(st.integers(1, MOST), max_size=6)))),
        {end: draw(figures) for _, end in hidden if draw(st.booleans())},
    )


policies = st.builds(
    CachePolicy,
    mode=st.sampled_from(["exact", "tail", "auto", "zero", "off"]),
    replay_ratio=st.floats(0.001, 1),
    min_tail_tokens=st.integers(4, 200),
    max_replay_tokens=st.one_of(st.just(2048), st.integers(0, MOST)),
    max_reprefill_tokens=st.one_of(st.just(256), st.integers(0, MOST)),
    error_budget=st.sampled_from([0.01, 0.03, 0.1, 0.3]),
)
shapes = st.builds(
    ModelShape,
    fa_layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    hidden_sources=st.integers(0, 3),
    tails_by_group=st.booleans(),
    replays_tokens=st.booleans(),
)
prompts = st.integers(1, MOST + 100)


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
    assert [r.first_token for r in ranges_of(plan, Kind.HIDDEN)] == [927, 917]
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


def test_the_state_at_a_boundary_is_repaired_from_hiddens_or_from_tokens():
    stored = StoredPrefix(1000, b"leaf", 1000, 0, ((600, 1000),), (at(500), at(700), at(900)))
    near = plan_repair(stored, 800, TOKENS_TOO)
    assert (near.checkpoint, near.replay_from, near.replay_first) == (at(700), "hiddens", 700)
    assert [Kind(r.kind) for r in near.ranges] == [Kind.CHECKPOINT, Kind.HIDDEN, Kind.HIDDEN]
    far = plan_repair(stored, 650, TOKENS_TOO)
    assert (far.checkpoint, far.replay_from, far.replay_first) == (at(500), "tokens", 500)
    assert [Kind(r.kind) for r in far.ranges] == [Kind.CHECKPOINT]
    assert plan_repair(stored, 650, BY_GROUP) is None


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


def run(kind, first, end, provenance=EXACT, tier=pb.TIER_CPU):
    return pb.Run(kind=kind, tier=tier, provenance=provenance, first_token=first, end_token=end)


def test_runs_of_both_tiers_are_one_prefix_and_a_hole_ends_it():
    answer = pb.MatchResponse(
        matched_tokens=900,
        leaf=b"leaf",
        runs=[
            run(pb.KIND_KV, 0, 256),
            run(pb.KIND_KV, 256, 512, tier=pb.TIER_REDIS),
            run(pb.KIND_KV, 768, 900),
            run(pb.KIND_HIDDEN, 64, 128),
            run(pb.KIND_HIDDEN, 128, 192, tier=pb.TIER_REDIS),
            run(pb.KIND_HIDDEN, 832, 900),
        ],
    )
    stored = stored_prefix(answer)
    assert (stored.kv_tokens, stored.inexact_tokens) == (512, 0)
    assert stored.hidden == ((64, 192), (832, 900))
    assert plan_fetch(stored, 1000, CachePolicy(), SHAPE).lost == {"kv_missing": 388}


def test_approximate_payload_counts_as_none_and_is_lost_to_provenance():
    answer = pb.MatchResponse(
        matched_tokens=600,
        leaf=b"leaf",
        runs=[
            run(pb.KIND_KV, 0, 256),
            run(pb.KIND_KV, 256, 512, APPROXIMATE),
            run(pb.KIND_HIDDEN, 0, 512, APPROXIMATE),
        ],
        checkpoints=[
            pb.Checkpoint(token=128, provenance=EXACT, prefix_hash=b"a"),
            pb.Checkpoint(token=256, provenance=APPROXIMATE, prefix_hash=b"b"),
        ],
    )
    plan = plan_fetch(stored_prefix(answer), 700, CachePolicy(), SHAPE)
    assert plan.checkpoint == StoredCheckpoint(128, b"a")
    assert plan.used_tokens == 256
    assert plan.lost == {"provenance": 256, "kv_missing": 88}
    tail = plan_fetch(stored_prefix(answer), 700, CachePolicy(mode="tail"), SHAPE)
    assert tail.mode == "miss"
    assert tail.lost == {"hidden_missing": 256, "provenance": 256, "kv_missing": 88}


@pytest.mark.parametrize("size", [1, 5, 7, 31, 102])
def test_figures_of_a_size_that_none_have_are_left_out_and_counted(size):
    known = pb.Run(kind=pb.KIND_HIDDEN, end_token=64, provenance=EXACT, tail_figures=bytes(6))
    rogue = pb.Run(
        kind=pb.KIND_HIDDEN,
        first_token=64,
        end_token=700,
        provenance=EXACT,
        tail_figures=bytes(size),
    )
    runs = [run(pb.KIND_KV, 0, 700), known, rogue]
    stored = stored_prefix(pb.MatchResponse(matched_tokens=700, leaf=b"leaf", runs=runs))
    assert stored.mismatches == 1
    assert (stored.figures_at(64), stored.figures_at(700)) == (bytes(6), b"")
    assert stored.hidden == ((0, 700),)
    for mode in ("auto", "tail", "exact"):
        plan_fetch(stored, 800, CachePolicy(mode=mode, error_budget=0.3), SHAPE)


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
