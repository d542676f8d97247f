"""vllm#46453, PR 48195, 48425, 54302: groups that hit differently took the larger of the two."""

import pytest
from case_helpers import ask, assert_right, drop, fork, policy, prompt

from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model

STORED = prompt(1000)


@pytest.mark.parametrize(("kv", "hidden", "rows"), [(768, 512, "tokens"), (512, 768, "hiddens")])
def test_a_tail_uses_no_more_than_there_are_keys_and_values(store, engine, kv, hidden, rows):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.KV, from_token=kv)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=hidden)
    report = ask(engine, fork(STORED, 900), policy=policy("tail")).report
    assert (report["matched_tokens"], report["used_tokens"]) == (768, kv)
    assert report["replay_from"] == rows
    assert report["lost"] == ({"kv_missing": 768 - kv} if kv < 768 else {})


@pytest.mark.parametrize(("kv", "hidden"), [(768, 512), (512, 768)])
def test_exact_without_a_state_uses_no_more_than_there_is_of_both(store, engine, kv, hidden):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.KV, from_token=kv)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=hidden)
    tokens = fork(STORED, 900)
    out = ask(engine, tokens, policy=policy())
    assert (out.report["matched_tokens"], out.report["used_tokens"]) == (768, 512)
    assert (out.report["mode"], out.report["replayed_tokens"]) == ("exact", 512)
    assert out.report["lost"] == {"kv_missing" if kv < hidden else "hidden_missing": 256}
    assert_right(out, tokens)


def test_auto_knows_the_error_of_a_tail_at_the_smaller_of_the_two(store, engine):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.KV, from_token=512)
    tokens = fork(STORED, 900)
    out = ask(engine, tokens, policy=policy("auto"))
    assert out.report["used_tokens"] == 512
    assert 256 < out.report["tail_wanted"] <= 512  # more than half of it, so no tail is taken
    assert (out.report["mode"], out.report["replayed_tokens"]) == ("exact", 512)
    assert_right(out, tokens)
