"""What is needed first comes first, and runs while the rest is on its way."""

import threading

import pytest
from case_helpers import (
    WAIT_S,
    ask,
    assert_reused,
    fork,
    names_of,
    policy,
    prompt,
    replica,
)
from hf_prompts import SHORT
from tiny_models import tiny_qwen

from tailreplay.connector.hf_model import HybridModel
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    "how", [policy("tail"), policy(max_reprefill_tokens=0)], ids=["tail", "exact"]
)
def test_all_replay_runs_before_any_keys_and_values_have_come(server, open_gate, tenant, how):
    """The store holds them back until the last layer of the last group has been replayed."""
    replayed = threading.Event()
    model = tiny_qwen()
    last = HybridModel(model).groups[-1].linear_layers[-1]

    open_gate.hold = lambda kind: kind is not Kind.KV or replayed.wait(WAIT_S)
    with replica(server.address, model, tenant=tenant) as engine:
        ask(engine, SHORT)
        norm = model.model.layers[last].input_layernorm
        hook = norm.register_forward_hook(lambda *_: replayed.set())
        replayed.clear()
        out = ask(engine, fork(SHORT, 299), policy=how)
        hook.remove()
    assert_reused(out.report, 299)
    assert out.report["replayed_tokens"] > 0
    names = names_of(out.report)
    replays = [i for i, name in enumerate(names) if name.startswith("replay:")]
    assert len(replays) == len(HybridModel(model).groups)
    assert max(replays) < min(names.index(f"first_rows:kv:{unit}") for unit in (0, 2))
    used = [names.index(f"kv_used:{layer}") for layer in (3, 7)]
    assert used == sorted(used)
    assert min(used) > names.index("complete:kv:0")


def test_the_first_full_attention_layer_runs_while_later_layers_are_still_on_their_way(
    server, open_gate, tenant
):
    first_used = threading.Event()
    seen = []
    model = tiny_qwen()

    def hold(kind):
        if kind is Kind.KV:
            seen.append(kind)
            assert len(seen) == 1 or first_used.wait(WAIT_S)

    open_gate.hold = hold
    with replica(server.address, model, tenant=tenant) as engine:
        tokens = prompt(200, seed=30)
        ask(engine, tokens)
        attention = model.model.layers[3].self_attn
        hook = attention.register_forward_hook(lambda *_: first_used.set())
        first_used.clear()
        out = ask(engine, fork(tokens, 150), policy=policy("tail"))
        hook.remove()
    assert_reused(out.report, 150)
    names = names_of(out.report)
    assert names.index("kv_used:3") < names.index("first_rows:kv:2")
