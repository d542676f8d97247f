"""LMCache#2845, PR 2863, PR 2879: keys and values without states garbled 40% of answers."""

import pytest
from case_helpers import ask, assert_reused, assert_right, drop, fork, policy, prompt, replica

from tailreplay.connector.client import StoreClient
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model

STORED = prompt(1000)


def test_the_boundary_moves_back_to_where_a_tail_exists(store, engine):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=896)
    out = ask(engine, fork(STORED, 980), policy=policy("tail"))
    assert (out.report["matched_tokens"], out.report["used_tokens"]) == (980, 896)
    assert out.report["lost"] == {"hidden_missing": 84}
    assert out.report["replayed_tokens"] == 67


@pytest.mark.parametrize("mode", ["tail", "exact", "auto"])
def test_without_any_hiddens_no_state_is_made_up(store, engine, mode):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=0)
    tokens = fork(STORED, 980)
    out = ask(engine, tokens, policy=policy(mode))
    if mode == "tail":
        assert (out.report["mode"], out.report["used_tokens"]) == ("miss", 0)
        assert out.report["lost"] == {"hidden_missing": 980}
    else:
        assert_reused(out.report, 980)
        assert out.report["replayed_tokens"] == 0
    assert_right(out, tokens)


def test_hiddens_that_go_between_match_and_fetch_are_a_miss(store, engine, request):
    class Late(StoreClient):
        def match(self, *args, **kwargs):
            answer = super().match(*args, **kwargs)
            drop(store, engine, STORED, Kind.HIDDEN, from_token=0)
            return answer

    ask(engine, STORED)
    tokens = fork(STORED, 980)
    with Late(store.address) as client, replica(client, tenant=request.node.nodeid) as late:
        out = ask(late, tokens, policy=policy("tail"))
    assert (out.report["mode"], out.report["lost"]) == ("miss", {"evicted": 980})
    assert_right(out, tokens)
