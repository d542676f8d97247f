"""Engines tell the store whose they are, and serve in the mode that its operator set."""

from contextlib import closing

import pytest
from case_helpers import STORE, WAIT_S, ask, fork, policy, prompt, replica
from store_objects import Client

from tailreplay.connector.hf import CachePolicy
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.namespace import tenant_digest

pytestmark = pytest.mark.model

TOKENS = prompt(600)
UNSAID = CachePolicy(match_timeout_s=WAIT_S, stall_timeout_s=WAIT_S, max_replay_tokens=64)
ACME = tenant_digest("acme")


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(**STORE) as running:
        yield running


@pytest.fixture
def admin(server):
    with closing(Client(server.address)) as client:
        yield client.admin


def of_tenant(admin, tenant: bytes) -> pb.TenantInfo:
    return admin.ListTenants(pb.ListTenantsRequest(tenant=tenant)).tenants[0]


def test_what_an_engine_stores_is_its_tenants_and_goes_with_it(server, admin):
    with replica(server.address, tenant="acme") as engine, replica(server.address) as nobodys:
        ask(engine, TOKENS)
        ask(nobodys, TOKENS)
        assert of_tenant(admin, ACME).cpu_bytes > 0
        assert of_tenant(admin, ACME).namespaces == 1
        answer = admin.Erase(pb.EraseRequest(tenant=ACME))
        assert (answer.cpu_objects_left, answer.namespaces) == (0, 1)
        assert ask(engine, TOKENS).report["matched_tokens"] == 0
        assert ask(nobodys, TOKENS).report["matched_tokens"] == 599


def test_an_operators_mode_is_used_where_nobody_else_has_said_one(server, admin):
    tenant = tenant_digest("moody")
    admin.SetMode(pb.SetModeRequest(tenant=tenant, mode="tail"))
    with (
        replica(server.address, tenant="moody", policy=UNSAID) as unsaid,
        replica(server.address, tenant="moody", policy=policy("exact")) as said,
    ):
        ask(unsaid, TOKENS)
        # No state lies near this boundary, so that the two modes show.
        beyond = fork(TOKENS, 500)
        assert ask(unsaid, beyond).report["mode"] == "tail"
        assert ask(said, fork(TOKENS, 500, seed=2)).report["mode"] == "exact"
        asked = unsaid.generate(fork(TOKENS, 500, seed=3), 1, policy=policy("exact"))
        assert asked.report["mode"] == "exact"
        admin.SetMode(pb.SetModeRequest(tenant=tenant))
        assert ask(unsaid, fork(TOKENS, 500, seed=4)).report["mode"] == "exact"


@pytest.mark.parametrize("mode", ["", "some day's mode"])
def test_a_mode_that_is_not_known_changes_nothing(mode):
    assert UNSAID.with_default_mode(mode) is UNSAID
    assert UNSAID.with_default_mode("auto").mode == "auto"
