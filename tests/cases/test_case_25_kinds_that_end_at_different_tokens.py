"""vllm#46453, PR 48195, 48425, 54302: groups that hit differently took the larger of the two."""

import pytest
from case_helpers import ask, assert_right, drop, fork, policy, prompt

from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model

STORED = prompt(1000)


@pytest.mark.parametrize(
    ("kv", "hidden", "reason"), [(768, 512, "hidden_missing"), (512, 768, "kv_missing")]
)
def test_a_tail_uses_the_smaller_of_the_two(store, engine, kv, hidden, reason):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.KV, from_token=kv)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=hidden)
    report = ask(engine, fork(STORED, 900), policy=policy("tail")).report
    assert (report["matched_tokens"], report["used_tokens"]) == (768, 512)
    assert report["lost"] == {reason: 256}


@pytest.mark.parametrize(("kv", "hidden"), [(768, 512), (512, 768)])
@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_exact_uses_what_keys_and_values_there_are(store, engine, kv, hidden, mode):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.KV, from_token=kv)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=hidden)
    tokens = fork(STORED, 900)
    out = ask(engine, tokens, policy=policy(mode))
    assert (out.report["matched_tokens"], out.report["used_tokens"]) == (768, kv)
    assert_right(out, tokens)
