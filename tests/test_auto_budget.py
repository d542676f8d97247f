"""`auto` through an engine and a store: a tail where the figures allow one, all of it where not."""

import numpy as np
import pytest
import torch
from mini_served import Stateless, corpus, minis

from tailreplay.connector.calibration import Calibration
from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf import CachePolicy, HybridEngine
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.stored import stored_prefix
from tailreplay.connector.tail_figures import BUDGETS, unpack
from tailreplay.replay.tail_error import span_tails
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model


WAIT = {"match_timeout_s": 20.0, "stall_timeout_s": 20.0, "weigh_time": False}
TOKENS = 640


@pytest.fixture(scope="module", params=["retrieval", "state"])
def served(request):
    """A miniature's name, an engine that has stored a text without any state, and the text."""
    text = corpus().passage(np.random.default_rng(8), TOKENS, held_back=True).tolist()
    with (
        serve_in_thread(stall_limit_s=60.0) as server,
        Stateless(server.address) as client,
        HybridEngine(minis.load(request.param), client, CachePolicy(**WAIT)) as engine,
    ):
        engine.generate(text, 1)
        assert engine.flush(60)
        yield request.param, engine, text


class Reading(Stateless):
    """As that; and it stores nothing."""

    def put(self, *_, **__):
        pass


def asked(served, m, **settings):
    _, engine, text = served
    settings = {"mode": "auto", "error_budget": 0.3, "max_reprefill_tokens": 0} | settings
    with (
        Reading(engine._client.address) as client,
        HybridEngine(engine._model._model, client, CachePolicy(**WAIT, **settings)) as reader,
    ):
        return reader.generate([*text[:m], 300, 301], 1)


def figures(engine, tokens):
    """Tails by group and budget in the page in which a prompt's match ends."""
    with StoreClient(engine._client.address) as client:
        answer = client.match(engine.namespace, extended_tokens(tokens), timeout_s=20.0)
    return unpack(stored_prefix(answer).figures_at(answer.matched_tokens))


@pytest.mark.parametrize("m", [333, 601])
def test_only_the_miniature_that_forgets_is_served_from_short_tails_alone(served, m):
    report = asked(served, m).report
    assert (report["matched_tokens"], report["used_tokens"]) == (m, m)
    if served[0] == "retrieval":
        assert report["mode"] == "tail"
        assert report["replayed_tokens"] < m / 2
        assert report["tail_wanted"] < m
    else:
        assert report["tail_wanted"] >= m
        assert report["replayed_tokens"] >= m / 2


def test_where_that_is_too_much_it_is_a_miss_that_says_how_much(served):
    report = asked(served, 601, max_replay_tokens=200).report
    if served[0] == "retrieval":
        assert (report["mode"], report["used_tokens"]) == ("tail", 601)
    else:
        assert (report["mode"], report["lost"]) == ("miss", {"no_checkpoint": 601})
        assert report["tail_wanted"] > 200


def test_a_smaller_budget_replays_more_and_is_nearer_to_full(served):
    full = asked(served, 601, mode="off").first_logits
    off_by, rows = [], []
    for budget in BUDGETS:
        out = asked(served, 601, error_budget=budget, min_tail_tokens=4)
        rows.append(out.report["replayed_tokens"])
        off_by.append(float((out.first_logits - full).abs().max() / full.abs().max()))
    assert rows == sorted(rows)
    assert off_by[-1] <= off_by[0] <= 0.1
    assert off_by[-1] < 0.02


def test_the_stored_figures_are_those_of_the_prefill(served):
    _, engine, text = served
    view = HybridModel(engine._model._model)
    cache = view.new_cache()
    with view.watch.trace() as trace:
        for start in (0, 576):
            part = text[start : 576 if start == 0 else TOKENS]
            view.forward(torch.tensor(part), cache)
            cache.note_states(trace, start + len(part))
    pages = [(at, at + 64) for at in range(0, TOKENS, 64)]
    wanted = span_tails(trace, view.group_places, pages)
    for page in (0, 4, 9):
        m = pages[page][1] - 7
        assert figures(engine, text[:m]).tolist() == wanted[page].tolist()


def test_figures_of_a_hit_go_on_from_those_it_hit(served):
    _, engine, text = served
    more = corpus().passage(np.random.default_rng(9), 150).tolist()
    prompt = [*text[:500], *more]
    with (
        StoreClient(engine._client.address) as client,
        HybridEngine(engine._model._model, client, CachePolicy(**WAIT)) as second,
        HybridEngine(engine._model._model, client, CachePolicy(**WAIT), tenant="x") as cold,
    ):
        assert second.generate(prompt, 1).report["used_tokens"] == 500
        assert cold.generate(prompt, 1).report["used_tokens"] == 0
        assert second.flush(60)
        assert cold.flush(60)
        for end in (505, 576, 640):
            found, wanted = (figures(e, prompt[:end]) for e in (second, cold))
            assert (found > 0).all()
            # Norms of states are known at other tokens, so the two need not agree to the token.
            assert (found >= 0.5 * wanted).all(), (end, found, wanted)


@pytest.fixture
def junction(request):
    """A store that has lost its checkpoints, the miniature that forgets, and a text in it."""
    text = corpus().passage(np.random.default_rng(12), TOKENS, held_back=True).tolist()
    how = CachePolicy(mode="auto", error_budget=0.3, max_reprefill_tokens=0, **WAIT)
    with (
        serve_in_thread(stall_limit_s=60.0) as server,
        LosesStates(server.address) as client,
        HybridEngine(minis.load("retrieval"), client, how) as engine,
    ):
        engine.generate(text, 1)
        assert engine.flush(60)
        client.loses = False
        yield engine, text


class LosesStates(StoreClient):
    """A client that puts no checkpoints while it `loses` them."""

    loses = True

    def put(self, namespace, tokens, objects, **how):
        kept = [o for o in objects if not self.loses or o.announce.kind != Kind.CHECKPOINT]
        return super().put(namespace, tokens, kept, **how)


def test_a_junction_that_was_approximate_once_is_exact_from_then_on(junction):
    engine, text = junction
    first = engine.generate([*text[:500], 300, 301], 1)
    assert (first.report["mode"], first.report["used_tokens"]) == ("tail", 500)
    assert engine.flush(60)
    second = engine.generate([*text[:500], 302, 303], 1)
    assert (second.report["mode"], second.report["used_tokens"]) == ("exact", 500)
    assert second.report["checkpoint_token"] == 500
    assert second.report["replayed_tokens"] == second.report["recomputed_tokens"] == 0
    cold = engine.generate([*text[:500], 302, 303], 1, policy=CachePolicy(mode="off"))
    off_by = (second.first_logits - cold.first_logits).abs().max() / cold.first_logits.abs().max()
    assert off_by <= 1e-4


def test_a_repair_tells_how_wrong_the_tail_was(junction):
    engine, text = junction
    for m in (599, 500, 401):  # none has a repaired state behind it
        engine.generate([*text[:m], 300, 301], 1)
        assert engine.flush(60)
    found = engine.calibration.figures()
    assert found["tails"] == 3
    assert 0 < found["worst"] < 1.5


def test_what_is_not_to_be_repaired_stays_approximate(junction):
    engine, text = junction
    how = engine.policy.model_copy(update={"exact_repair": False})
    for other in (300, 302):
        out = engine.generate([*text[:500], other, 301], 1, policy=how)
        assert out.report["mode"] == "tail"
        assert engine.flush(60)
    assert engine.calibration.figures()["tails"] == 0


def test_figures_are_believed_until_one_tail_in_twenty_breaks_its_budget():
    calibration = Calibration()
    for _ in range(19):
        calibration.observe(0.1, 0.5)
    assert calibration.budget(0.1) == 0.1  # too few to tell
    calibration = Calibration()
    for _ in range(95):
        calibration.observe(0.1, 0.09)
    for _ in range(5):
        calibration.observe(0.1, 0.4)
    assert calibration.budget(0.1) == 0.1
    for _ in range(6):
        calibration.observe(0.1, 0.4)
    assert calibration.budget(0.1) == pytest.approx(0.025)
    assert calibration.figures() == {"tails": 106, "within": 95 / 106, "worst": pytest.approx(4)}
