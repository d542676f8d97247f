"""LMCache#5151, PR 5249: a full hit on a block boundary put the last token into the state twice."""

import pytest
import torch
from case_helpers import STATE_BOUND, Hit, ask, assert_reused, assert_right, policy, prompt
from tiny_models import relative_l2

pytestmark = pytest.mark.model

TOKENS = prompt(4 * 256)
LAST = len(TOKENS) - 1


def worst(got, wanted):
    return max(relative_l2(got[layer].recurrent, wanted[layer].recurrent) for layer in wanted)


def test_the_state_before_the_last_token_has_seen_every_token_once(store, engine):
    ask(engine, TOKENS)
    hit = Hit(engine, store.address, TOKENS, policy())
    assert hit.plan.used_tokens == LAST
    model, cache = hit.model, hit.model.new_cache()
    model.forward(torch.tensor(TOKENS[:LAST]), cache)
    right = cache.states()
    assert worst(hit.done.states[LAST], right) <= STATE_BOUND

    model.forward(torch.tensor(TOKENS[LAST - 1 : LAST]), cache)
    assert worst(hit.done.states[LAST], cache.states()) > 100 * STATE_BOUND

    out = ask(engine, TOKENS)
    assert_reused(out.report, LAST)
    assert_right(out, TOKENS)
