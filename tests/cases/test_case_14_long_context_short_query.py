"""llama.cpp PR 21099: at 258K tokens all 32 states of a long context were thrown away.

There is no cap on how many boundaries a context has, nor on how long it is.
"""

import os

import pytest
from store_objects import Client, Prefix, put_frames, runs_of, span_range

from tailreplay.store.geometry import Dtype, checkpoint_geometry, kv_geometry
from tailreplay.store.objects import Kind

KV, _, CHECKPOINT = Kind
CONTEXT_TOKENS = 258_000
STATES = 400
SMALL = {
    KV: kv_geometry(fa_layers=1, kv_heads=1, head_dim=4, dtype=Dtype.FLOAT32),
    CHECKPOINT: checkpoint_geometry(
        shape=(1, 1, 1, 4, 4, 3), dtype=Dtype.FLOAT32, state_dtype=Dtype.FLOAT32
    ),
}


@pytest.fixture(scope="module")
def context(store):
    """A context of 258,000 tokens, with its keys and values and 400 states."""
    prefix = Prefix(os.urandom(32), range(CONTEXT_TOKENS), SMALL)
    ends = range(CONTEXT_TOKENS // STATES, CONTEXT_TOKENS + 1, CONTEXT_TOKENS // STATES)
    states = [(CHECKPOINT, end - 1, end) for end in ends]
    answer = store.store.put(put_frames(prefix, [*prefix.spans(KV), *states]), lambda: None)
    assert (answer.stored, answer.dropped) == (1008 + STATES, 0)
    return prefix


@pytest.fixture
def client(store):
    client = Client(store.address)
    yield client
    client.close()


def test_every_short_query_behind_the_context_reuses_all_of_it(client, context):
    for query in range(5):
        ids = [*context.ids, 7_000_000 + query, 1, 2, 3]
        found = client.match(Prefix(context.namespace, ids, SMALL))
        assert found.matched_tokens == CONTEXT_TOKENS
        assert runs_of(found, KV) == [(0, CONTEXT_TOKENS)]
        assert found.checkpoints[-1].token == CONTEXT_TOKENS


def test_no_state_is_thrown_away_for_another(client, context):
    found = client.match(context)
    assert len(found.checkpoints) == STATES
    (last, middle) = found.checkpoints[-1], found.checkpoints[STATES // 2]
    for state in (last, middle):
        wanted = span_range(CHECKPOINT, state.token - 1, state.token, prefix_hash=state.prefix_hash)
        rows = client.fetch(context, wanted, leaf=found.leaf).rows[0]
        assert rows == context.rows(CHECKPOINT, state.token - 1, state.token)


@pytest.mark.parametrize("m", [1, 4_097, 131_071, 200_001, 257_999])
def test_a_query_that_leaves_the_context_earlier_reuses_up_to_there(client, context, m):
    other = Prefix(context.namespace, [*context.ids[:m], 9_000_000], SMALL)
    found = client.match(other)
    assert found.matched_tokens == m
    states = [state.token for state in found.checkpoints]
    assert states == list(range(645, m + 1, 645))
