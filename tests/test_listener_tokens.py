"""Who gets through which door with a token, and what it opens."""

import hashlib
import logging
import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from listener_clients import PREFIX, WAIT_S, client_of, fetch, put
from store_objects import Prefix, span_range
from tokens_file import TENANTS, bearer, serve_tenants, write_tokens

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.credentials import NO_CREDENTIALS
from tailreplay.store.errors import (
    NotAllowed,
    NotAuthenticated,
    TailReplayError,
)
from tailreplay.store.lane_wire import (
    PLACED,
    RecordKind,
    Request,
)
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    with serve_tenants(folder, stall_limit_s=60) as server:
        yield server, folder


@pytest.fixture
def as_(with_tokens):
    server, folder = with_tokens

    def connect_as(name, **how):
        return client_of(server.address, bearer(folder, name), **how)

    return connect_as


def test_without_a_good_token_nothing_but_health_is_told(with_tokens):
    server, folder = with_tokens
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with client_of(server.address, bearer(folder, "nobody")) as client:
        leaf = bytes(32)
        for call in (
            client.stats,
            client.describe,
            lambda: client.match(PREFIX.namespace, PREFIX.tokens),
            lambda: put(client),
            lambda: list(client.fetch(PREFIX.namespace, leaf, [], timeout_s=WAIT_S)),
            lambda: client.release(bytes(16)),
        ):
            with pytest.raises(NotAuthenticated):
                call()
        assert client._lanes.take() is None


def test_a_refused_token_does_not_open_the_breaker(with_tokens):
    server, folder = with_tokens
    credentials = bearer(folder, "late")
    with client_of(server.address, credentials, lanes=False) as client:
        for _ in range(10):
            with pytest.raises(NotAuthenticated):
                client.match(PREFIX.namespace, PREFIX.tokens)
        credentials.token_file.write_text("token-acme")
        client.match(PREFIX.namespace, PREFIX.tokens)


@pytest.mark.parametrize("lanes", [True, False])
def test_tenants_see_their_own_objects_and_nothing_else(as_, lanes):
    prefix = Prefix(os.urandom(32), range(1, 301))
    with as_("acme", lanes=lanes) as client:
        assert put(client, prefix).stored == len(prefix.spans())
        leaf = client.match(prefix.namespace, prefix.tokens).leaf
        rows, _, over_lane = fetch(client, prefix)
        assert (rows, over_lane) == (prefix.rows(Kind.KV, 0, 300), lanes)
    with as_("acme2", lanes=lanes) as client:
        assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 300
        assert put(client, prefix).duplicates == len(prefix.spans())
    with as_("rival", lanes=lanes) as client:
        assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 0
        rows, kinds, _ = fetch(client, prefix, leaf=leaf)
        assert (bytes(len(rows)), [RecordKind.MISSING]) == (
            rows,
            [k for k in kinds if k is not RecordKind.LEASE],
        )
        assert put(client, prefix).duplicates == 0


def test_nobody_asks_a_tenant_to_count_what_others_do(as_):
    with as_("acme") as client:
        put(client)
        with pytest.raises(NotAllowed, match="role is tenant"):
            client.stats()
        seen = client.describe()
        assert dict(seen.settings) == {}
        assert seen.boot_id
        # Its own, by the names that it uses itself; more in test_public_scope.
        assert all(s.namespace == s.sent_namespace for s in seen.namespaces)
        assert {s.tenant for s in seen.namespaces} <= {tenant_digest("acme")}
    with as_("scraper") as client:
        client.stats()
        seen = client.describe()
        assert (dict(seen.settings), list(seen.namespaces)) == ({}, [])
        with pytest.raises(NotAllowed, match="role is metrics"):
            client.match(PREFIX.namespace, PREFIX.tokens)
    with as_("root") as client:
        client.stats()
        seen = client.describe()
        assert seen.settings["listen"]
        assert tenant_digest("acme") in {s.tenant for s in seen.namespaces}


def test_the_pool_is_mapped_by_those_whose_token_says_so(as_):
    for name, mapped in (("acme", False), ("sharer", True)):
        with as_(name) as client:
            put(client)
            lane = client._lanes.take()
            client._lanes.give_back(lane)
            assert (lane.segment is not None) == mapped
            assert fetch(client)[0] == PREFIX.rows(Kind.KV, 0, 300)


def test_a_reader_that_may_not_map_the_pool_is_sent_rows_though_it_asks_for_offsets(as_):
    with as_("acme") as client, as_("sharer") as other:
        put(client)
        put(other)
        lane, mapped = client._lanes.take(), other._lanes.take()
        lane.segment = mapped.segment  # it says PLACED from now on
        client._lanes.give_back(lane)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        wanted = span_range(Kind.KV, 0, 300)
        lane.sock.settimeout(WAIT_S)
        request = pb.FetchRequest(namespace=PREFIX.namespace, leaf=leaf, ranges=[wanted])
        lane.request(Request.FETCH, request, PLACED)
        assert lane.record().kind is RecordKind.ROWS
        mapped.close()


def test_shared_memory_can_be_refused_to_everybody():
    with (
        serve_in_thread(share_memory=False) as server,
        client_of(server.address, NO_CREDENTIALS) as client,
    ):
        put(client)
        lane = client._lanes.take()
        client._lanes.give_back(lane)
        assert lane.segment is None
        assert fetch(client)[0] == PREFIX.rows(Kind.KV, 0, 300)


def test_a_lane_ends_with_the_token_that_opened_it(tmp_path):
    file = write_tokens(tmp_path / "tokens.json", **TENANTS)
    with (
        serve_in_thread(token_file=file) as server,
        client_of(server.address, bearer(tmp_path, "acme")) as client,
    ):
        put(client)
        leaf = client.match(PREFIX.namespace, PREFIX.tokens).leaf
        write_tokens(file, rival={"tenant": "rival"})
        stream = client.fetch(PREFIX.namespace, leaf, [span_range(Kind.KV, 0, 9)], timeout_s=WAIT_S)
        with pytest.raises(NotAuthenticated, match="not good any more"):
            list(stream)


def test_one_tenant_does_not_take_every_lane(tmp_path):
    with (
        serve_tenants(tmp_path, max_lanes=4) as server,
        client_of(server.address, bearer(tmp_path, "acme")) as greedy,
        client_of(server.address, bearer(tmp_path, "rival")) as other,
    ):
        lanes = [greedy._lanes.take() for _ in range(3)]
        assert [lane is not None for lane in lanes] == [True, True, False]
        lanes.append(other._lanes.take())
        assert lanes[-1] is not None
        for lane in filter(None, lanes):
            lane.close()


def test_operators_have_a_door_of_their_own(with_tokens):
    server, folder = with_tokens
    assert server.admin_address == f"{server.address}.admin"
    assert os.stat(server.admin_address.removeprefix("unix://")).st_mode & 0o777 == 0o600
    for name, code in (
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("nobody", grpc.StatusCode.UNAUTHENTICATED),
        ("acme", grpc.StatusCode.PERMISSION_DENIED),
        ("scraper", grpc.StatusCode.PERMISSION_DENIED),
        ("root", grpc.StatusCode.UNIMPLEMENTED),
    ):
        metadata = bearer(folder, name).metadata() if name else ()
        with grpc.insecure_channel(server.admin_address) as channel:
            call = channel.unary_unary("/tailreplay.store.v1.Admin/NoSuchMethod")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=WAIT_S, metadata=metadata)
            assert caught.value.code() is code, name


def test_no_token_is_said_aloud(tmp_path, caplog):
    """Not when it is good, not when it is refused, not by the client and not by the store."""
    file = write_tokens(tmp_path / "tokens.json", **TENANTS)
    said = []
    with caplog.at_level(logging.DEBUG), serve_in_thread(token_file=file) as server:
        for name in ("acme", "nobody", "root"):
            with client_of(server.address, bearer(tmp_path, name)) as client:
                for call in (client.describe, client.stats, lambda c=client: put(c)):
                    try:
                        said.append(str(call()))
                    except TailReplayError as error:
                        said.append(str(error))
                said.append(repr(client))
        said.append(str(server.store.describe().settings))
        said.append(str(server.store.config))
        write_tokens(file, acme={"tenant": "other"})
        with (
            client_of(server.address, bearer(tmp_path, "acme")) as client,
            pytest.raises(NotAllowed),
        ):
            client.stats()
    said += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    assert any("read 1 tokens" in text for text in said)
    digests = [hashlib.sha256(f"token-{name}".encode()).hexdigest() for name in TENANTS]
    for text in said:
        assert "token-" not in text
        assert not any(digest in text for digest in digests)


def test_a_token_is_not_sent_over_a_network_in_the_clear(tmp_path):
    with pytest.raises(ValueError, match=r"would go to 10\.0\.0\.1:7 in the clear"):
        StoreClient("10.0.0.1:7", credentials=bearer(tmp_path, "acme"))
