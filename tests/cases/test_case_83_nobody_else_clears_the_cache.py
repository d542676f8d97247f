"""LMCache#5128: an endpoint on 0.0.0.0 ran code for anybody, and anybody could clear the cache."""

import grpc
import lane_objects
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lane_objects import WAIT_S
from store_objects import Prefix
from test_probes import ask
from tokens_file import TENANTS, bearer, write_tokens

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store import serve_in_thread
from tailreplay.store.address import is_local
from tailreplay.store.config import StoreConfig

PREFIX = Prefix(bytes(range(32)), range(1, 301))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store on loopback TCP, with operators' door on TCP as well."""
    folder = tmp_path_factory.mktemp("case83")
    file = write_tokens(folder / "tokens.json", **TENANTS)
    with serve_in_thread(
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        token_file=file,
    ) as server:
        yield server, folder


def clear(address, credentials=None):
    """Status of an attempt to clear everything."""
    metadata = credentials.metadata() if credentials else ()
    with grpc.insecure_channel(address) as channel:
        try:
            rpc.AdminStub(channel).Clear(
                pb.ClearRequest(everything=True), timeout=WAIT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_only_an_administrators_token_clears_the_cache(served):
    server, folder = served
    acme = bearer(folder, "acme")
    with StoreClient(server.address, credentials=acme, match_timeout_s=WAIT_S) as client:
        lane_objects.put(client, PREFIX)

        def matched():
            return client.match(PREFIX.namespace, PREFIX.tokens).matched_tokens

        for name, code in (
            (None, grpc.StatusCode.UNAUTHENTICATED),
            ("nobody", grpc.StatusCode.UNAUTHENTICATED),
            ("acme", grpc.StatusCode.PERMISSION_DENIED),
            ("scraper", grpc.StatusCode.PERMISSION_DENIED),
        ):
            assert clear(server.admin_address, name and bearer(folder, name)) is code
            assert clear(server.address, name and bearer(folder, name)) is not grpc.StatusCode.OK
        assert clear(server.address, bearer(folder, "root")) is grpc.StatusCode.UNIMPLEMENTED
        assert matched() == 300
        assert clear(server.admin_address, bearer(folder, "root")) is grpc.StatusCode.OK
        assert matched() == 0


def test_nothing_listens_beyond_this_machine_unless_told_to():
    config = StoreConfig()
    assert config.listen.startswith("unix:")
    assert config.admin_address is not None
    assert config.admin_address.startswith("unix:")
    assert config.http_listen is None
    for field in ("listen", "admin_listen", "http_listen"):
        with pytest.raises(ValueError, match="beyond loopback"):
            StoreConfig(**{field: "0.0.0.0:0", "token_file": "t.json"})


def test_there_is_no_door_but_those_that_are_named(served):
    server, folder = served
    root = bearer(folder, "root")
    services = set()
    for address in (server.address, server.admin_address):
        assert is_local(address)
        with grpc.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = stub.ServerReflectionInfo(
                iter([request]), timeout=WAIT_S, metadata=root.metadata()
            )
            services |= {s.name for s in next(answers).list_services_response.service}
    assert services == {
        "tailreplay.store.v1.Store",
        "tailreplay.store.v1.Admin",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for path in ("/run_script", "/api/clear", "/..%2f", "/debug/pprof", "/"):
        assert ask(server.http_address, path)[0] == 404
