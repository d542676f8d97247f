"""`explain A B` counts as an engine in mode `exact` plans."""

import json

from hypothesis import given
from hypothesis import strategies as st
from store_objects import Client, Prefix
from typer.testing import CliRunner

from tailreplay.connector.fetch_plan import ModelShape
from tailreplay.connector.plan import plan_fetch
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import stored_prefix
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.objects import Kind
from tailreplay.store.prompt_cost import (
    LONGEST_PREFILLED_GAP,
    LONGEST_REPLAYED_GAP,
    PromptCost,
    prompt_cost,
)

SHAPE = ModelShape(fa_layers=3, kv_heads=2, hidden_sources=2)
MOST = 4000
provenances = st.sampled_from([pb.PROVENANCE_EXACT, pb.PROVENANCE_APPROXIMATE])
tokens = st.integers(0, MOST)


@st.composite
def answers(draw):
    """What a store may say: whole prefixes now and then, holes, states of either kind."""
    kinds = st.sampled_from([pb.KIND_KV, pb.KIND_HIDDEN])
    runs = [
        pb.Run(kind=kind, first_token=first, end_token=first + size, provenance=provenance)
        for kind, first, size, provenance in draw(
            st.lists(st.tuples(kinds, st.just(0) | tokens, tokens, provenances), max_size=6)
        )
    ]
    states = [
        pb.Checkpoint(token=token, provenance=provenance)
        for token, provenance in sorted(draw(st.dictionaries(tokens, provenances)).items())
        if token
    ]
    return pb.MatchResponse(matched_tokens=draw(tokens), runs=runs, checkpoints=states)


@given(answers(), st.integers(1, MOST))
def test_costs_are_those_of_an_engines_plan(answer, total):
    plan = plan_fetch(stored_prefix(answer), total, CachePolicy(), SHAPE)
    wanted = PromptCost(plan.checkpoint_token, plan.replayed_tokens, total - plan.prefill_from)
    assert prompt_cost(answer, MOST, total) == wanted


def test_the_longest_gaps_are_an_engines_defaults():
    policy = CachePolicy()
    assert policy.max_reprefill_tokens == LONGEST_PREFILLED_GAP
    assert policy.max_replay_tokens == LONGEST_REPLAYED_GAP


def test_explain_counts_from_the_nearest_stored_state(tmp_path):
    first = Prefix(bytes(range(32)), range(1200))
    second = [*first.ids[:500], *range(9000, 9060)]
    files = [tmp_path / "a.json", tmp_path / "c.json"]
    for file, ids in zip(files, (first.ids, second), strict=True):
        file.write_text(json.dumps(ids))

    with serve_in_thread() as server:

        def explained(*options):
            words = ["explain", *map(str, files), "--url", server.address, "--format", "json"]
            answer = json.loads(CliRunner().invoke(app, [*words, *options]).stdout)
            assert answer["shared_tokens"] == 500
            names = ("from_checkpoint", "tokens_to_replay", "tokens_to_prefill")
            return tuple(answer[name] for name in names), answer["counted"]

        assert explained()[0] == (None, None, 60)
        assert "the store names no namespace" in explained()[1]
        client = Client(server.address)
        kv = [(Kind.KV, at, min(at + 256, 1200)) for at in range(0, 1200, 256)]
        client.put(first, [*kv, (Kind.CHECKPOINT, 1023, 1024)])
        assert explained()[0] == (0, 0, 560)
        assert "from what the store has" in explained()[1]
        assert explained("--namespace", "00" * 32)[0] == (0, 0, 560)
        client.put(first, [(Kind.HIDDEN, at, at + 64) for at in range(0, 512, 64)])
        assert explained()[0] == (0, 500, 60)
        client.put(first, [(Kind.CHECKPOINT, 255, 256)])
        assert explained()[0] == (256, 0, 304)
        client.close()
    assert explained()[0] == (None, None, 60)
