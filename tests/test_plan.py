"""Plans are never inexact unasked, never beyond what is stored, and account for every token."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.connector.plan import (
    NOTHING,
    ModelShape,
    StoredCheckpoint,
    StoredPrefix,
    plan_fetch,
    plan_put,
    prefill_cuts,
    stored_prefix,
    tail_rows,
)
from tailreplay.connector.policy import CachePolicy
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import Kind

SHAPE = ModelShape(fa_layers=3, kv_heads=2, hidden_sources=2)
EXACT, APPROXIMATE = pb.PROVENANCE_EXACT, pb.PROVENANCE_APPROXIMATE
MOST = 3000


def at(token):
    return StoredCheckpoint(token, token.to_bytes(32, "big"))


@st.composite
def spans(draw, most):
    """Ascending, disjoint, non-adjacent spans within `most` tokens."""
    edges = sorted(draw(st.sets(st.integers(0, most), max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def stored_prefixes(draw):
    matched = draw(st.integers(0, MOST))
    kv = draw(st.one_of(st.just(matched), st.integers(0, matched)))
    return StoredPrefix(
        matched,
        b"leaf",
        kv,
        draw(st.integers(0, matched - kv)),
        draw(st.one_of(st.just(((0, matched),) if matched else ()), spans(matched))),
        tuple(at(t) for t in sorted(draw(st.sets(st.integers(1, MOST), max_size=6)))),
    )


policies = st.builds(
    CachePolicy,
    mode=st.sampled_from(["exact", "tail", "auto", "zero", "off"]),
    replay_ratio=st.floats(0.001, 1),
    min_tail_tokens=st.integers(4, 200),
    max_replay_tokens=st.one_of(st.just(2048), st.integers(0, MOST)),
    max_reprefill_tokens=st.one_of(st.just(256), st.integers(0, MOST)),
)
shapes = st.builds(
    ModelShape,
    fa_layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    hidden_sources=st.integers(0, 3),
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
    if plan.replay_first is not None:
        replayed = ranges_of(plan, Kind.HIDDEN)[: shape.hidden_sources]
        assert [r.first_unit for r in replayed] == list(range(shape.hidden_sources))
        assert {(r.first_token, r.end_token) for r in replayed} <= {
            (plan.replay_first, plan.prefill_from)
        }


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


@given(stored_prefixes(), prompts, policies)
def test_auto_is_exact_where_the_gap_fits_and_never_uses_less_than_exact_or_tail(
    stored, prompt, policy
):
    plans = {
        mode: plan_fetch(stored, prompt, policy.model_copy(update={"mode": mode}), SHAPE)
        for mode in ("exact", "tail", "auto")
    }
    usable = min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    assert plans["auto"].used_tokens == max(plans["exact"].used_tokens, plans["tail"].used_tokens)
    if plans["exact"].used_tokens == usable:
        assert plans["auto"] == plans["exact"]


@given(stored_prefixes(), prompts, policies)
def test_tail_takes_the_largest_boundary_whose_tail_is_stored(stored, prompt, policy):
    policy = policy.model_copy(update={"mode": "tail"})
    plan = plan_fetch(stored, prompt, policy, SHAPE)
    usable = min(stored.matched_tokens, prompt - 1, stored.kv_tokens)
    tails = (b for b in range(usable, 0, -1) if stored.has_hidden(b - tail_rows(b, policy), b))
    assert plan.used_tokens == next(tails, 0)


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
