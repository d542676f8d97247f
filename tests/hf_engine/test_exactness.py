"""States, logits and tokens of a hit are those of a prefill, or the mode says that they are not."""

import pytest
import torch
from case_helpers import (
    LOGITS_BOUND,
    STATE_BOUND,
    WAIT_S,
    Hit,
    ask,
    assert_reused,
    assert_right,
    fork,
    names_of,
    policy,
    prefilled_logits,
    replica,
)
from hf_prompts import LONG, SHORT
from tiny_models import relative_l2, relative_max, tiny_qwen

from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.chain import PrefixChain
from tailreplay.store.header import Header, build_parts
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model

SMALL_M = [1, 2, 3, 4, 5, 63, 64, 65, 257, 299]


@pytest.fixture(scope="module")
def truth():
    """States after m tokens of SHORT, and logits after a prompt, by plain prefill split at m."""
    model = HybridModel(tiny_qwen())

    def prefill(m, tokens):
        cache = model.new_cache()
        model.forward(torch.tensor(tokens[:m]), cache)
        states = cache.states()
        return states, model.forward(torch.tensor(tokens[m:]), cache)

    return prefill


WAYS = {
    "prefilled again": policy(),
    "replayed from the nearest state": policy(max_reprefill_tokens=0),
    "replayed from the first token": policy("tail", replay_ratio=1.0),
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("m", SMALL_M)
def test_states_and_logits_are_those_of_a_prefill(server, engine, truth, m, how):
    tokens = fork(SHORT, m, 20, seed=8)
    hit = Hit(engine, server.address, tokens, how)
    plan = hit.plan
    assert (plan.matched_tokens, plan.used_tokens, plan.exact) == (m, m, True)
    states, logits = truth(m, tokens)
    for layer, state in states.items():
        got = hit.done.states[m][layer]
        assert relative_l2(got.conv, state.conv) <= STATE_BOUND
        assert relative_l2(got.recurrent, state.recurrent) <= STATE_BOUND
    assert relative_max(hit.done.logits, logits) <= LOGITS_BOUND
    assert all(tensor.isfinite().all() for pair in hit.done.kv for tensor in pair)


@pytest.mark.parametrize("m", [64, 257, 299])
def test_a_state_of_the_token_before_would_be_seen(server, tenant, truth, m):
    """The check above can fail: a checkpoint at m that holds the state at m - 1 is far off."""
    tokens = fork(SHORT, m, 20)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        states, _ = truth(m - 1, tokens)
        put_checkpoint(engine, server.address, tenant, tokens, m, states)
        out = ask(engine, tokens)
        assert_reused(out.report, m)
        assert out.report["checkpoint_token"] == m
        _, logits = truth(m, tokens)
        assert relative_max(out.first_logits, logits) > 100 * LOGITS_BOUND


def put_checkpoint(engine, store, tenant, tokens, m, states):
    """Stores states as those after m tokens, whatever they are."""
    codec = PayloadCodec(HybridModel(tiny_qwen()).dims)
    ids = extended_tokens(tokens)
    name = PrefixChain(engine.namespace, ids).prefix_hash(m)
    header = Header(
        ObjectName(engine.namespace, Kind.CHECKPOINT, name),
        codec.geometry[Kind.CHECKPOINT],
        m - 1,
        1,
        (),
    )
    parts = build_parts(header, [codec.pack_checkpoint(states)])
    announce = pb.PutObject(
        kind=pb.KIND_CHECKPOINT,
        first_token=m - 1,
        end_token=m,
        size_bytes=sum(len(part) for part in parts),
    )
    with StoreClient(store) as client:
        objects = [ObjectBytes(announce, parts)]
        whose = tenant_digest(tenant)
        done = client.put(engine.namespace, ids, objects, timeout_s=WAIT_S, tenant=whose)
    assert done.stored == 1


@pytest.mark.parametrize(
    ("mode", "least", "most"), [("tail", 1e-6, 0.5), ("zero", 1e-3, 10.0)], ids=["tail", "zero"]
)
def test_approximate_modes_say_so_and_store_nothing(server, tenant, mode, least, most):
    tokens = fork(SHORT, 257)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        stored = server.store.stats().stored_bytes
        out = ask(engine, tokens, policy=policy(mode, exact_repair=False))
        assert out.report["mode"] == mode
        assert_reused(out.report, 257)
        assert out.report["replayed_tokens"] == (67 if mode == "tail" else 0)
        assert "not_stored:provenance" in names_of(out.report)
        assert server.store.stats().stored_bytes == stored
        assert least < relative_max(out.first_logits, prefilled_logits(tokens, 257)) < most


def test_auto_makes_up_no_state_that_the_error_figures_do_not_vouch_for(server, tenant):
    """The tiny model has heads that forget nothing in so few tokens."""
    tokens = fork(SHORT, 200)
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        missed = ask(engine, tokens, policy=policy("auto", max_replay_tokens=199))
        assert (missed.report["mode"], missed.report["lost"]) == ("miss", {"no_checkpoint": 200})
        assert missed.report["tail_wanted"] >= 200
        assert_right(missed, tokens)
        exact = ask(engine, fork(SHORT, 200, seed=2), policy=policy("auto", max_replay_tokens=200))
        assert exact.report["mode"] == "exact"
        assert_reused(exact.report, 200)


def test_a_gap_beyond_the_limit_is_lost_once_and_never_again_at_that_junction(server, tenant):
    strict = policy(max_replay_tokens=40)
    with replica(server.address, policy=strict, tenant=tenant) as engine:
        ask(engine, SHORT)
        first = ask(engine, fork(SHORT, 299, seed=1))
        assert (first.report["matched_tokens"], first.report["used_tokens"]) == (299, 256)
        assert first.report["lost"] == {"gap_too_long": 43}
        second = ask(engine, fork(SHORT, 299, seed=2))
        assert_reused(second.report, 299)
        assert second.report["checkpoint_token"] == 299


def test_off_asks_nobody(server, tenant):
    with replica(server.address, tenant=tenant) as engine:
        ask(engine, SHORT)
        lookups = server.store.stats().lookups
        out = ask(engine, SHORT, policy=policy("off"))
        assert (out.report["mode"], out.report["rpcs"]) == ("off", 0)
        assert out.report["miss_reason"] is None
        assert server.store.stats().lookups == lookups
        assert_right(out, SHORT)


@pytest.mark.parametrize(("mode", "steps"), [("off", [320]), ("tail", [21]), ("exact", [65])])
def test_what_is_not_stored_is_not_noted_and_not_cut_for_it(server, tenant, mode, steps):
    """An approximate answer is not stored either; nor does a state cost a forward of its own."""
    model, ran, noted = tiny_qwen(), [], []
    inner = model.model

    def look(_module, _args, given):
        ran.append(given["input_ids"].shape[1])
        noted.append(any(module._forward_hooks for module in inner.layers.modules()))

    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        tokens = fork(SHORT, 300, more=21)
        hook = inner.register_forward_pre_hook(look, with_kwargs=True)
        out = ask(engine, SHORT if mode == "off" else tokens, policy=policy(mode))
        hook.remove()
    assert out.report["used_tokens"] == (0 if mode == "off" else 300)
    assert ran == steps
    assert set(noted) == {mode == "exact"}


def test_a_hit_decodes_the_same_tokens_as_a_prefill(engine):
    tokens = fork(LONG, 700, seed=9)
    cold = engine.generate(tokens, 12, policy=policy("off"))
    hit = engine.generate(tokens, 12)
    assert hit.report["used_tokens"] == 700
    assert hit.tokens == cold.tokens
    assert len(hit.tokens) == 12


def test_a_bf16_model_reuses_too(server, tenant):
    model = tiny_qwen(torch.bfloat16)
    tokens = fork(SHORT, 257)
    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        out = ask(engine, tokens)
        assert_reused(out.report, 257)
        wanted = prefilled_logits(tokens, 257, model)
        assert relative_max(out.first_logits, wanted) < 5e-2
