"""A tail whose hiddens are gone: its tokens run against the stored keys and values."""

import time

import numpy as np
import pytest
import torch
from case_helpers import ask, assert_reused, drop, names_of, policy
from mini_served import Stateless, corpus, minis
from tiny_models import FAMILIES, random_tokens, relative_l2, relative_max

from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf import HybridEngine
from tailreplay.connector.hf_model import HybridModel
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model

TOKENS, BOUNDARIES = 640, (333, 450, 601)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("step", [1, 13, 30])
def test_from_exact_states_tokens_give_exact_states_and_keep_the_stored_kv(family, step):
    view, tokens = HybridModel(FAMILIES[family]()), random_tokens(130)
    whole, cut = view.new_cache(), view.new_cache()
    view.forward(tokens, whole)
    view.forward(tokens[:100], cut)
    logits = view.forward(tokens[100:], cut)
    kept = {layer: whole.kv(layer)[0].clone() for layer in view.dims.fa_layers}
    earlier = view.new_cache()
    view.forward(tokens[:100], earlier)
    whole.set_states(earlier.states())
    served = whole.as_of(100)
    for part in tokens[100:].split(step):
        again = view.forward(part, served)
    assert relative_max(again, logits) <= 1e-5
    wanted, found = cut.states(), whole.states()
    for layer in view.dims.linear_layers:
        assert relative_l2(found[layer].recurrent, wanted[layer].recurrent) <= 1e-5
        assert relative_l2(found[layer].conv, wanted[layer].conv) <= 1e-5
    for layer in view.dims.fa_layers:
        assert torch.equal(whole.kv(layer)[0], kept[layer])


@pytest.fixture(scope="module", params=["retrieval", "state"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def served(name):
    """An engine that has stored a text, its store, and the text."""
    text = corpus().passage(np.random.default_rng(8), TOKENS, held_back=True).tolist()
    how = policy("tail", replay_ratio=0.1, min_tail_tokens=4, exact_repair=False)
    with (
        serve_in_thread(stall_limit_s=60.0) as server,
        Stateless(server.address) as client,
        HybridEngine(minis.load(name), client, how) as engine,
    ):
        ask(engine, text)
        yield engine, server, text


def asked(served, m, **how):
    engine, _, text = served
    other = [*text[:m], 300, 301]
    return ask(engine, other, policy=engine.policy.model_copy(update=how))


@pytest.fixture(scope="module")
def answers(served):
    """By boundary: answers from plain prefill, a tail of hiddens, and one of tokens."""
    engine, server, text = served
    full = {m: asked(served, m, mode="off") for m in BOUNDARIES}
    hiddens = {m: asked(served, m) for m in BOUNDARIES}
    stored = server.store.stats().stored_bytes
    drop(server, engine, text, Kind.HIDDEN, from_token=0)
    tokens = {m: asked(served, m) for m in BOUNDARIES}
    assert server.store.stats().stored_bytes <= stored
    return {m: (full[m], hiddens[m], tokens[m]) for m in BOUNDARIES}


def test_the_whole_boundary_is_used_and_the_report_says_how(answers):
    for m, (_, hiddens, tokens) in answers.items():
        for out, rows in ((hiddens, "hiddens"), (tokens, "tokens")):
            assert out.report["mode"] == "tail"
            assert out.report["replay_from"] == rows
            assert_reused(out.report, m)
            assert out.report["replayed_tokens"] == -(-m // 10) + 3
            assert out.report["recomputed_tokens"] == 0
            assert "not_stored:provenance" in names_of(out.report)
        assert "replay:tokens" in names_of(tokens.report)
        assert set(tokens.report["bytes"]["cpu"]) == {"kv"}


def test_answers_are_off_by_no_more_than_half_as_much_again_as_from_hiddens(answers):
    off_by = [
        [relative_max(out.first_logits, full.first_logits) for out in others]
        for full, *others in answers.values()
    ]
    from_hiddens, from_tokens = np.array(off_by).mean(0)
    assert 0 < from_tokens <= 1.5 * from_hiddens + 1e-4


def test_what_is_waited_for_before_the_suffix_is_no_part_of_its_time(served, answers):
    engine, server, _ = served
    reader = server.store._reader
    reader._before_rows = lambda _: time.sleep(0.5)
    try:
        phases_s = asked(served, BOUNDARIES[1]).report["phases_s"]
    finally:
        reader._before_rows = None
    assert phases_s["kv"] > phases_s["suffix"]
    assert engine._pace._prefills[-1].seconds == phases_s["suffix"]


def test_auto_takes_tokens_where_the_figures_allow_and_prefills_where_not(served, answers, name):
    m = BOUNDARIES[-1]
    out = asked(served, m, mode="auto", error_budget=0.3, max_reprefill_tokens=0)
    off_by = relative_max(out.first_logits, answers[m][0].first_logits)
    if name == "retrieval":
        assert_reused(out.report, m)
        assert (out.report["mode"], out.report["replay_from"]) == ("tail", "tokens")
        assert out.report["replayed_tokens"] < m / 2
        assert off_by < 0.1
    else:
        assert (out.report["mode"], out.report["lost"]) == ("miss", {"no_checkpoint": m})
        assert off_by <= 1e-4


def test_the_state_there_is_repaired_from_tokens_so_that_the_next_answer_is_exact(served):
    engine, server, text = served
    m = BOUNDARIES[0] + 7
    drop(server, engine, text, Kind.HIDDEN, from_token=0)
    how = {"exact_repair": True, "prefill_chunk_tokens": 64}
    with (
        StoreClient(server.address) as client,
        HybridEngine(engine._model._model, client, engine.policy.model_copy(update=how)) as other,
    ):
        first = ask(other, [*text[:m], 300, 301])
        assert (first.report["mode"], first.report["replay_from"]) == ("tail", "tokens")
        second = ask(other, [*text[:m], 302, 303], policy=policy("exact"))
    assert_reused(second.report, m)
    assert second.report["checkpoint_token"] == m
    full = ask(engine, [*text[:m], 302, 303], policy=policy("off"))
    assert relative_max(second.first_logits, full.first_logits) <= 1e-4
