"""Stored prefixes, policies and shapes of models for tests of the planner."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tailreplay.connector.fetch_plan import ModelShape
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.connector.tail_figures import pack

SHAPE = ModelShape(fa_layers=3, kv_heads=2, hidden_sources=2)
BY_GROUP = replace(SHAPE, tails_by_group=True)
TOKENS_TOO = replace(BY_GROUP, replays_tokens=True)
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
