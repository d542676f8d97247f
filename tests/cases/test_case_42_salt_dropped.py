"""sglang#37160, LMCache#4825: a salt got lost on the way, and a tenant had another's hit."""

import pytest
from case_helpers import STORE, WAIT_S, ask, assert_reused, assert_right, prompt, replica
from tokens_file import TENANTS, bearer, write_tokens

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread

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
    file = write_tokens(tmp_path / "tokens.json", **TENANTS)
    with serve_in_thread(token_file=file, **STORE) as server:

        def asked_by(name):
            credentials = bearer(tmp_path, name)
            with (
                StoreClient(
                    server.address, credentials=credentials, match_timeout_s=WAIT_S
                ) as client,
                replica(client) as engine,
            ):
                return ask(engine, TOKENS)

        assert_nothing(asked_by("acme"))
        assert_nothing(asked_by("rival"))
        assert_reused(asked_by("acme2").report, 599)
