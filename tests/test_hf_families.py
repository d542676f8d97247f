"""The engine end to end on the families beside Qwen3.5, which `tests/hf_engine` has at length."""

import pytest
from case_helpers import STORE, ask, assert_reused, assert_right, fork, policy, prompt, replica
from tiny_models import FAMILIES

from tailreplay.store import serve_in_thread

pytestmark = pytest.mark.model

STORED = prompt(400)

REPLAY = policy(max_reprefill_tokens=0)


@pytest.fixture(scope="module")
def server():
    """One for the whole module; each test is a tenant of its own."""
    with serve_in_thread(**STORE) as server:
        yield server


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - {"qwen3_5_text"}))
def model(request):
    return FAMILIES[request.param]()


@pytest.fixture
def engine(server, model, request):
    """Has run STORED."""
    with replica(server.address, model, tenant=request.node.name) as engine:
        ask(engine, STORED)
        yield engine


def assert_closed(report, start, replayed, recomputed):
    """The gap from a state at `start` was closed in this way."""
    names = ("mode", "checkpoint_token", "replayed_tokens", "recomputed_tokens")
    assert tuple(report[name] for name in names) == ("exact", start, replayed, recomputed)


def test_a_gap_is_prefilled_once(engine, model):
    ask(engine, fork(STORED, 201))  # from here on there is a state at 201
    for seed, recomputed in ((1, 20), (2, 0)):
        tokens = fork(STORED, 221, seed=seed)
        out = ask(engine, tokens)
        assert_reused(out.report, 221)
        assert_right(out, tokens, model)
        assert_closed(out.report, 221 - recomputed, 0, recomputed)


def test_a_gap_is_replayed_once_from_the_first_token_or_from_a_state(engine, model):
    for m, start in ((301, 0), (333, 301)):
        for seed, replayed in ((1, m - start), (2, 0)):
            tokens = fork(STORED, m, seed=seed)
            out = ask(engine, tokens, policy=REPLAY)
            assert_reused(out.report, m)
            assert_right(out, tokens, model)
            assert_closed(out.report, m - replayed, replayed, 0)


def test_a_tail_as_long_as_the_prefix_is_exact(engine, model):
    tokens = fork(STORED, 343)
    out = ask(engine, tokens, policy=policy("tail", replay_ratio=1.0))
    assert_reused(out.report, 343)
    assert out.report["replayed_tokens"] == 343
    assert_right(out, tokens, model)
