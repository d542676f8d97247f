"""Operators, tenants and their tokens: who may operate, and whose objects are whose."""

import os
from contextlib import contextmanager

import grpc
import pytest
from store_objects import Prefix, put_frames
from tokens_file import bearer, serve_tenants

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.namespace import tenant_digest

ACME, RIVAL = tenant_digest("acme"), tenant_digest("rival")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def server(folder):
    with serve_tenants(folder, pool_bytes=8 << 20) as running:
        yield running


@pytest.fixture
def as_bearer(server, folder):
    """Stubs that carry a token."""

    @contextmanager
    def stubs(name: str):
        who = bearer(folder, name)
        with (
            who.channel(server.address, []) as channel,
            who.channel(server.admin_address, []) as admin_channel,
        ):
            yield rpc.StoreStub(channel), rpc.AdminStub(admin_channel)

    return stubs


def put(stub: rpc.StoreStub, prefix: Prefix) -> None:
    assert stub.Put(put_frames(prefix), timeout=20).dropped == 0


@pytest.mark.parametrize("name", ["acme", "scraper"])
def test_only_administrators_operate(as_bearer, name):
    with as_bearer(name) as (_, admin), pytest.raises(grpc.RpcError) as caught:
        admin.Clear(pb.ClearRequest(everything=True), timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_nobody_operates_without_a_token(server):
    with (
        grpc.insecure_channel(server.admin_address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        rpc.AdminStub(channel).ListTenants(pb.ListTenantsRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_service_is_at_the_operators_door_alone(server, folder):
    with (
        bearer(folder, "root").channel(server.address, []) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        rpc.AdminStub(channel).ListTenants(pb.ListTenantsRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_token_says_whose_objects_are_whatever_its_bearer_claims(as_bearer):
    # Both send the same namespace, and one of them says that it is the other.
    space = os.urandom(32)
    with as_bearer("acme") as (acme, _), as_bearer("rival") as (rival, _):
        put(acme, Prefix(space, range(600), tenant=RIVAL))
        put(rival, Prefix(space, range(600)))
        with as_bearer("root") as (_, admin):
            admin.SetQuota(pb.SetQuotaRequest(tenant=ACME, cpu_bytes=1 << 20))
            told = {t.tenant: t for t in admin.ListTenants(pb.ListTenantsRequest()).tenants}
            assert told[ACME].cpu_bytes == told[RIVAL].cpu_bytes > 0
            assert (told[ACME].namespaces, told[RIVAL].namespaces) == (1, 1)
            answer = admin.Erase(pb.EraseRequest(tenant=ACME), timeout=20)
            assert (answer.namespaces, answer.cpu_objects_left) == (1, 0)
            told = {t.tenant: t for t in admin.ListTenants(pb.ListTenantsRequest()).tenants}
            assert told[RIVAL].cpu_bytes > 0
