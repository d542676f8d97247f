"""sglang#37160, LMCache#4825: a salt got lost on the way, and a tenant had another's hit."""

import pytest
from case_helpers import STORE, ask, ask_as, assert_reused, assert_right, prompt, replica
from tokens_file import bearer, serve_tenants

pytestmark = pytest.mark.model

TOKENS = prompt(600)


def assert_nothing(out):
    assert (out.report["matched_tokens"], out.report["miss_reason"]) == (0, "not_stored")
    assert_right(out, TOKENS)


def test_another_salt_hits_nothing_and_the_same_salt_everything(store, engine, request):
    ask(engine, TOKENS)
    with replica(store.address, tenant="another") as other:
        assert_nothing(ask(other, TOKENS))
    with replica(store.address, tenant=request.node.nodeid) as same:
        assert_reused(ask(same, TOKENS).report, 599)


def test_another_token_hits_nothing_and_the_same_tenants_everything(tmp_path):
    """Though all of them name the same namespace, by mistake or in order to steal."""
    with serve_tenants(tmp_path, **STORE) as server:
        assert_nothing(ask_as(server, bearer(tmp_path, "acme"), TOKENS))
        assert_nothing(ask_as(server, bearer(tmp_path, "rival"), TOKENS))
        assert_reused(ask_as(server, bearer(tmp_path, "acme2"), TOKENS).report, 599)
