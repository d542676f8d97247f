"""Tails chosen from decays and norms alone, held against what is known of them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.connector import tail_figures
from tailreplay.replay.tail_error import (
    BUDGETS,
    DecayTrace,
    span_tails,
    tail_lengths,
    tried_lengths,
)


def trace_of(half_lives, tokens=1000, first=0, chunk=300):
    """A trace of layers whose heads forget half in so many tokens, all states of norm 1."""
    trace = DecayTrace(range(len(half_lives)), first)
    for layer, heads in enumerate(half_lives):
        decay = -math.log(2) / torch.tensor(heads)
        for start in range(0, tokens, chunk):
            trace.add(layer, decay.expand(min(chunk, tokens - start), -1))
    for token in (first + 64, first + tokens):
        states = torch.zeros(len(half_lives[0]), 3, 5)
        states[:, 0, 0] = 1.0
        trace.note_states(token, [states] * len(half_lives))
    return trace


def next_tried(tokens):
    return next(length for length in tried_lengths(10**6) if length >= tokens)


@pytest.mark.parametrize("half_life", [1.0, 5.0, 20.0, 60.0])
def test_a_tail_is_as_many_half_lives_as_the_budget_has_halvings(half_life):
    found = tail_lengths(trace_of([[half_life] * 2]), [[0]], [900])
    wanted = [next_tried(half_life * math.log2(1 / budget)) for budget in BUDGETS]
    assert found.tolist() == [[wanted]]


def test_the_slowest_layer_of_a_group_decides_and_other_groups_are_their_own():
    trace = trace_of([[2.0] * 2, [40.0] * 2, [2.0] * 2])
    together = tail_lengths(trace, [[0, 1], [2]], [900])
    alone = tail_lengths(trace, [[0], [1], [2]], [900])
    assert together[0, 0].tolist() == alone[0, 1].tolist()
    assert together[0, 1].tolist() == alone[0, 0].tolist() == alone[0, 2].tolist()


def test_a_head_counts_by_the_norm_it_has():
    trace = trace_of([[2.0, 10_000.0]])
    small = torch.zeros(2, 3, 5)
    small[0, 0, 0], small[1, 0, 0] = 1.0, 0.01
    trace.note_states(64, [small])
    trace.note_states(1000, [small])
    assert tail_lengths(trace, [[0]], [1000])[0, 0, 2] < 20
    assert tail_lengths(trace_of([[2.0, 10_000.0]]), [[0]], [1000])[0, 0].tolist() == [1000] * 3


def naive_length(trace, layers, end, budget):
    """One head after the other, with nothing shared between tails."""
    total, first = trace.total().double(), trace.first
    norms = trace.log_norms(torch.arange(first, first + len(total))).double().exp()
    for length in tried_lengths(end - first):
        left = (total[end - first] - total[end - length - first]).exp()
        lost = left * norms[end - length - first]
        error = (lost.norm(dim=-1) / norms[end - first].norm(dim=-1))[layers].max()
        if end - length >= first and error <= budget:
            return length
    return end if first == 0 else 0


@pytest.mark.parametrize("first", [0, 37])
def test_many_tails_at_once_are_as_long_as_one_by_one(first):
    draw = torch.Generator().manual_seed(first)
    trace, tokens, groups = DecayTrace(range(3), first), 500, [[0, 2], [1]]
    half_lives = (torch.rand(3, 4, generator=draw) * 3).exp()
    for layer in range(3):
        trace.add(layer, -torch.rand(tokens, 4, generator=draw) / half_lives[layer])
    for token in (first + 200, first + tokens):
        trace.note_states(token, [torch.randn(4, 3, 5, generator=draw) for _ in range(3)])
    ends = [first + end for end in (3, 70, 333, 500)]
    wanted = [[[naive_length(trace, g, end, b) for b in BUDGETS] for g in groups] for end in ends]
    assert tail_lengths(trace, groups, ends).tolist() == wanted
    assert len({n for row in wanted for group in row for n in group}) > 6


def test_a_head_that_forgets_all_at_once_leaves_nothing_and_not_a_number():
    trace = trace_of([[1e-6, 1e-3]])
    assert tail_lengths(trace, [[0]], [900]).tolist() == [[[4] * 3]]


def test_a_state_that_has_grown_makes_what_was_dropped_count_less():
    grown, level = trace_of([[50.0]]), trace_of([[50.0]])
    grown.note_states(1000, [torch.full((1, 3, 5), 10.0)])
    assert tail_lengths(grown, [[0]], [1000])[0, 0, 1] < tail_lengths(level, [[0]], [1000])[0, 0, 1]


def test_norms_between_those_noted_are_geometric_means():
    trace = DecayTrace([0])
    for token, norm in ((100, 1.0), (300, 4.0)):
        trace.note_states(token, [torch.full((1, 1, 1), norm)])
    found = trace.log_norms(torch.tensor([7, 100, 200, 300, 400])).exp()
    torch.testing.assert_close(found.flatten(), torch.tensor([1.0, 1.0, 2.0, 4.0, 4.0]))


def test_a_tail_that_nothing_shortens_is_all_from_the_start_and_not_known_from_later():
    heads = [[1e9]]
    assert tail_lengths(trace_of(heads), [[0]], [640, 1000]).tolist() == [[[640] * 3], [[1000] * 3]]
    assert tail_lengths(trace_of(heads, first=1), [[0]], [640]).tolist() == [[[0] * 3]]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_trace_too_short_for_any_tail_has_all_from_the_start_or_what_is_known(tokens):
    start = trace_of([[9.0]], tokens)
    assert span_tails(start, [[0]], [(0, tokens)]).tolist() == [[[tokens] * 3]]
    later, known = trace_of([[9.0]], tokens, first=300), torch.tensor([[250, 0, 400]])
    spans = [(256, 300 + tokens)]
    assert span_tails(later, [[0]], spans).tolist() == [[[0] * 3]]
    assert span_tails(later, [[0]], spans, known).tolist() == [[[250 + tokens, 0, 400 + tokens]]]


def test_a_span_has_the_longest_tail_of_the_ends_in_it():
    trace = trace_of([[9.0]])
    trace.note_states(500, [torch.full((1, 3, 5), 0.02)])
    ends = [448, 464, 480, 496, 512]
    each = tail_lengths(trace, [[0]], ends)
    assert each.amax(0).tolist() == span_tails(trace, [[0]], [(448, 512)])[0].tolist()
    assert (each.amax(0) > each.amin(0)).all()


def test_a_span_goes_on_from_what_is_known_at_the_trace_s_first_token():
    trace, known = trace_of([[100.0]], first=300), torch.tensor([[250, 400, 0]])
    near, far = span_tails(trace, [[0]], [(300, 320), (1100, 1152)], known)
    assert near.tolist() == [[270, 420, 0]]
    own = tail_lengths(trace, [[0]], [1152])
    assert far.tolist() == own[0].tolist()
    assert (own > 0).all()


def test_no_page_has_no_tails():
    assert span_tails(trace_of([[9.0]]), [[0]], []).shape == (0, 1, 3)


@given(st.integers(1, 50_000))
def test_lengths_that_are_tried_rise_by_at_most_a_quarter_from_sixteen_on(longest):
    lengths = tried_lengths(longest)
    assert lengths == sorted(set(lengths))
    assert all(length % 4 == 0 for length in lengths)
    pairs = itertools.pairwise(lengths)
    assert all(b - a <= max(4, a // 4) for a, b in pairs)


@given(st.lists(st.tuples(*[st.integers(0, 70_000)] * 3), min_size=1, max_size=16))
def test_figures_survive_packing_up_to_what_sixteen_bits_hold(tails):
    packed = tail_figures.pack(torch.tensor(tails).numpy())
    assert len(packed) == 6 * len(tails)
    assert tail_figures.unpack(packed).tolist() == [[min(t, 65535) for t in row] for row in tails]


def test_of_more_groups_than_fit_the_longest_is_kept_if_all_are_known():
    tails = torch.tensor([[5, 50, 0]] + [[7, 40, 9]] * 16).numpy()
    assert tail_figures.unpack(tail_figures.pack(tails)).tolist() == [[7, 50, 0]]


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (1.0, (10, 20)),
        (0.3, (10, 20)),
        (0.29, (30, 40)),
        (0.1, (30, 40)),
        (0.05, None),
        (0.01, None),
    ],
)
def test_a_budget_is_rounded_down_to_one_that_is_known(budget, wanted):
    packed = tail_figures.pack(torch.tensor([[10, 30, 0], [20, 40, 60]]).numpy())
    assert tail_figures.tails_within(packed, budget) == wanted


@pytest.mark.parametrize("tail", [0, 65535, 70_000])
def test_a_tail_that_is_not_known_or_beyond_measure_is_none(tail):
    packed = tail_figures.pack(torch.tensor([[10, 10, 10], [tail, 10, 10]]).numpy())
    assert tail_figures.tails_within(packed, 0.3) is None
    assert tail_figures.tails_within(packed, 0.1) == (10, 10)
    assert tail_figures.tails_within(b"", 0.3) is None


def test_both_sides_mean_the_same_budgets():
    assert tail_figures.BUDGETS == BUDGETS
