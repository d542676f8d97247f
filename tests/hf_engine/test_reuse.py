"""Replicas over one store reuse exactly what prompts share, at any token, and count it."""

import itertools

import pytest
import torch
from case_helpers import (
    LOGITS_BOUND,
    STORE,
    ask,
    assert_reused,
    assert_right,
    assert_sums,
    fork,
    in_another_process,
    names_of,
    prompt,
    replica,
    since,
)
from hf_prompts import LONG, SHORT
from tiny_models import relative_max, tiny_qwen

from tailreplay.connector.hf_model import HybridModel
from tailreplay.store import serve_in_thread

pytestmark = pytest.mark.model


class Prefills:
    """Plain prefill of LONG, cut at some tokens, from each of which a prompt can go on."""

    def __init__(self, *cuts):
        self._model = HybridModel(tiny_qwen())
        cache = self._model.new_cache()
        self._states = {}
        for start, end in itertools.pairwise((0, *sorted(cuts))):
            self._model.forward(torch.tensor(LONG[start:end]), cache)
            self._states[end] = cache.states()
        self._kv = {layer: cache.kv(layer) for layer in self._model.dims.fa_layers}

    def assert_right(self, first_logits, tokens, m):
        """These are the logits after `tokens`, of which LONG has the first m."""
        cache = self._model.new_cache()
        for layer, (keys, values) in self._kv.items():
            cache.install_kv(layer, keys[:, :m], values[:, :m])
        cache.set_states(self._states[m])
        wanted = self._model.forward(torch.tensor(tokens[m:]), cache)
        assert relative_max(first_logits, wanted) <= LOGITS_BOUND


LONG_M = [1, 3, 255, 256, 257, 1000, 3217, len(LONG) - 1]


@pytest.fixture(scope="module")
def long_truth():
    return Prefills(*LONG_M, 700, 1500, 2111)


@pytest.mark.parametrize("m", LONG_M)
def test_a_prompt_reuses_exactly_the_tokens_it_shares(engine, long_truth, m):
    tokens = fork(LONG, m)
    first = ask(engine, tokens)
    assert_reused(first.report, m)
    assert first.report["mode"] == "exact"
    long_truth.assert_right(first.first_logits, tokens, m)


@pytest.mark.parametrize("m", LONG_M)
def test_the_second_visit_to_a_junction_needs_no_replay(engine, long_truth, m):
    ask(engine, fork(LONG, m, seed=2))
    tokens = fork(LONG, m, seed=3)
    second = ask(engine, tokens)
    assert_reused(second.report, m)
    report = second.report
    assert (report["replayed_tokens"], report["recomputed_tokens"]) == (0, 0)
    assert (report["checkpoint_token"], report["mode"]) == (m, "exact")
    long_truth.assert_right(second.first_logits, tokens, m)


def test_a_prompt_sent_twice_computes_its_last_token_alone(engine, long_truth):
    for _ in range(2):
        out = ask(engine, LONG)
        assert_reused(out.report, len(LONG) - 1)
        long_truth.assert_right(out.first_logits, LONG, len(LONG) - 1)
    assert out.report["recomputed_tokens"] == 0


def test_siblings_that_fork_inside_a_block_each_match_their_own_tokens(server, tenant):
    a = prompt(500, seed=20)
    b = fork(a, 300, 200)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, a)
        assert_reused(ask(engine, b).report, 300)
        for tokens, shared in ((fork(b, 420), 420), (fork(a, 421, seed=4), 421)):
            out = ask(engine, tokens)
            assert_reused(out.report, shared)
            assert_right(out, tokens)


@pytest.mark.slow
def test_another_process_reuses_what_this_one_stored_and_the_other_way_round(
    server, engine, long_truth
):
    mine, theirs = fork(LONG, 2111, seed=6), fork(LONG, 1500, 400, seed=7)
    wanted = {"store": server.address, "prompts": [mine, theirs]}
    answer = in_another_process("engine_child.py", wanted, hash_seed=12345)
    assert answer["namespace"] == engine.namespace.hex()
    for out, tokens, m in zip(answer["answers"], (mine, theirs), (2111, 1500), strict=True):
        assert_reused(out["report"], m)
        assert_sums(out["report"])
        long_truth.assert_right(torch.tensor(out["logits"]), tokens, m)
    tokens = fork(theirs, 1777)
    out = ask(engine, tokens)
    assert_reused(out.report, 1777)
    assert_right(out, tokens)


@pytest.mark.parametrize("m", [257, 3217])
def test_a_hit_costs_two_round_trips_whatever_its_length(engine, m):
    out = ask(engine, fork(LONG, m, seed=11))
    assert out.report["used_tokens"] == m
    assert out.report["rpcs"] == 2
    assert names_of(out.report)[0] == "matched"


def test_a_miss_costs_one(engine):
    out = ask(engine, prompt(50, seed=77))
    assert (out.report["mode"], out.report["rpcs"]) == ("miss", 1)
    assert out.report["miss_reason"] == "not_stored"


def test_reports_and_the_store_count_the_same(server, tenant):
    prompts = [SHORT, fork(SHORT, 257), fork(SHORT, 5), fork(SHORT, 299), prompt(90, seed=3)]
    before = server.store.stats()
    with replica(server.address, tenant=tenant) as engine:
        reports = [ask(engine, tokens).report for tokens in prompts]
    stats = since(before, server.store.stats())
    total = {key: sum(r[f"{key}_tokens"] for r in reports) for key in ("prompt", "matched", "used")}
    assert total["matched"] == total["used"] == 257 + 5 + 299
    assert stats.lookups == len(prompts) == stats.hits + stats.misses
    assert stats.hits == sum(r["matched_tokens"] > 0 for r in reports)
    assert stats.queried_tokens == total["prompt"] == stats.matched_tokens + stats.unmatched_tokens
    assert stats.matched_tokens == total["matched"]
    loaded = sum(sum(kinds.values()) for r in reports for kinds in r["bytes"].values())
    assert loaded <= stats.served_bytes
    assert stats.integrity_errors == stats.dropped_objects == 0
    assert server.store.tiers.pinned_bytes == len(server.store.leases) == 0


@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_a_few_tokens_are_stored_alone_and_behind_a_hit(new):
    """Too few for any tail to be tried in what was prefilled."""
    few, more = prompt(new, seed=70 + new), fork(SHORT, 299, new)
    with serve_in_thread(**STORE) as server, replica(server.address) as engine:
        for tokens in (few, SHORT, more):
            ask(engine, tokens)
            out = ask(engine, [*tokens, 7, 8])
            assert_reused(out.report, len(tokens))
            assert_right(out, [*tokens, 7, 8])
