"""LMCache#2912: more external hits than were asked for made a counter fall, and the server died."""

from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_objects import Client, Prefix, span_range

from tailreplay.connector.fetch_plan import ModelShape
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.connector.vllm_plan import Asked, Tracked, hit_plan
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

MOST = 3000
KV = Kind.KV
COUNTERS = (
    "queried_tokens",
    "matched_tokens",
    "unmatched_tokens",
    "lookups",
    "hits",
    "misses",
    "integrity_errors",
    "damage_reports",
    "unfounded_damage_reports",
    "evicted_bytes",
    "dropped_objects",
    "stored_bytes",
    "served_bytes",
)


@given(
    prompt=st.integers(1, MOST),
    local=st.integers(0, MOST),
    matched=st.integers(0, MOST),
    states=st.sets(st.integers(1, MOST), max_size=5),
    mode=st.sampled_from(["exact", "tail", "auto"]),
)
def test_what_vllm_is_told_lies_between_nothing_and_the_rest_of_the_prompt(
    prompt, local, matched, states, mode
):
    local = min(local, prompt - 1)
    stored = StoredPrefix(
        matched,
        b"leaf",
        matched,
        0,
        ((0, matched),) if matched else (),
        tuple(StoredCheckpoint(token, bytes(32)) for token in sorted(states) if token <= matched),
    )
    asked: Future[Asked] = Future()
    asked.set_result(Asked(bytes(32), stored))
    request = SimpleNamespace(mm_features=(), prompt_token_ids=[0] * prompt)
    policy = CachePolicy(mode=mode)
    tracked = Tracked(request, [0] * prompt, policy, asked, 0, 0.0, local_tokens=local)
    plan = hit_plan(tracked, ModelShape(2, 2, 1))
    external = max(0, plan.prefill_from - local)
    assert 0 <= external <= prompt - local
    assert 0 <= plan.used_tokens <= min(matched, prompt - 1)


@pytest.fixture(scope="module")
def client():
    with serve_in_thread(pool_bytes=4 << 20) as server, closing(Client(server.address)) as client:
        yield client


def counters(client: Client) -> dict[str, int]:
    answer = client.stats()
    return {name: getattr(answer, name) for name in COUNTERS}


steps = st.tuples(
    st.sampled_from(["match", "put", "fetch", "clear"]), st.integers(0, 5), st.integers(1, 1500)
)


@settings(max_examples=15, deadline=None)
@given(st.lists(steps, min_size=1, max_size=8))
def test_no_counter_of_a_store_ever_falls_and_their_sums_hold(client, work):
    before = counters(client)
    for what, number, tokens in work:
        prefix = Prefix(bytes([number]) * 32, range(tokens))
        if what == "match":
            client.match(prefix)
        elif what == "put":
            client.put(prefix, prefix.spans(KV))
        elif what == "fetch":
            client.fetch(prefix, span_range(KV, 0, tokens))
        else:
            client.admin.Clear(pb.ClearRequest(namespace=prefix.namespace))
        after = counters(client)
        assert all(after[name] >= before[name] for name in COUNTERS)
        assert after["lookups"] == after["hits"] + after["misses"]
        assert after["queried_tokens"] == after["matched_tokens"] + after["unmatched_tokens"]
        before = after
