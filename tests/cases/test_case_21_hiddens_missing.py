"""LMCache#2845, PR 2863, PR 2879: keys and values without states garbled 40% of answers."""

import pytest
from case_helpers import (
    ask,
    assert_reused,
    assert_right,
    drop,
    fork,
    policy,
    prefilled_logits,
    prompt,
    replica,
)
from tiny_models import relative_max

from tailreplay.connector.client import StoreClient
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model

STORED = prompt(1000)


@pytest.mark.parametrize(("m", "used", "rows"), [(917, 896, "hiddens"), (980, 980, "tokens")])
def test_the_boundary_moves_back_to_where_a_tail_exists_or_the_tail_is_of_tokens(
    store, engine, m, used, rows
):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=896)
    out = ask(engine, fork(STORED, m), policy=policy("tail"))
    assert (out.report["matched_tokens"], out.report["used_tokens"]) == (m, used)
    assert out.report["lost"] == ({"hidden_missing": m - used} if m > used else {})
    assert (out.report["replay_from"], out.report["replayed_tokens"]) == (rows, 67)


@pytest.mark.parametrize("mode", ["tail", "exact", "auto"])
def test_without_any_hiddens_no_state_is_made_up(store, engine, mode):
    ask(engine, STORED)
    drop(store, engine, STORED, Kind.HIDDEN, from_token=0)
    tokens = fork(STORED, 980)
    out = ask(engine, tokens, policy=policy(mode))
    assert_reused(out.report, 980)
    if mode != "tail":
        assert out.report["replayed_tokens"] == 0
        assert_right(out, tokens)
        return
    assert (out.report["mode"], out.report["replay_from"]) == ("tail", "tokens")
    assert "not_stored:provenance" in [event["name"] for event in out.report["events"]]
    zeroed = ask(engine, tokens, policy=policy("zero"))
    full = prefilled_logits(tokens, 980)
    off_by = [relative_max(answer.first_logits, full) for answer in (out, zeroed)]
    assert off_by[0] < 0.75 * off_by[1]


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
