"""A gRPC server that stops whatever its calls do, and tells strangers nothing but its health."""

import logging
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from store_objects import Prefix, put_frames
from tokens_file import bearer, serve_tenants

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import grpc_listener, serve_in_thread
from tailreplay.store.auth import Access, Role
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.grpc_listener import GrpcListener

WAIT_S = 20
HEALTH = health_pb2.HealthCheckRequest()


class NeverOver:
    """A server with a call that does not end."""

    def stop(self, grace_s):
        return threading.Event()


def test_a_call_that_is_never_over_does_not_keep_a_server_from_stopping(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(grpc_listener, "_PATIENCE_S", 0.05)
    listener = GrpcListener(
        f"unix://{tmp_path}/s", threads=2, access=Access(None), roles=(), tls=None
    )
    server, listener.server = listener.server, NeverOver()
    with caplog.at_level(logging.WARNING):
        listener.stop_taking(0.05)
        listener.wait()
        listener.join()
    assert "stopping without them" in caplog.text
    server.stop(0).wait()


def test_strangers_may_ask_for_health_and_nobody_watches_it(tmp_path):
    metadata = bearer(tmp_path, "root").metadata()
    with serve_tenants(tmp_path) as server:
        for address in (server.address, server.admin_address):
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                assert stub.Check(HEALTH, timeout=WAIT_S).status == 1
                for known, code in (
                    ((), grpc.StatusCode.UNAUTHENTICATED),
                    (metadata, grpc.StatusCode.UNIMPLEMENTED),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        next(stub.Watch(HEALTH, timeout=WAIT_S, metadata=known))
                    assert caught.value.code() is code


def test_many_watches_that_are_called_off_do_not_keep_a_store_from_stopping():
    with serve_in_thread() as server, grpc.insecure_channel(server.address) as channel:
        for watch in [
            health_pb2_grpc.HealthStub(channel).Watch(HEALTH, timeout=WAIT_S) for _ in range(100)
        ]:
            watch.cancel()


def test_what_is_no_socket_is_left_alone(tmp_path):
    file = tmp_path / "store.sock"
    file.write_text("precious")
    listener = GrpcListener(
        f"unix://{file}", threads=1, access=Access(None), roles=(Role.ADMIN,), tls=None
    )
    with pytest.raises(StoreUnavailable, match="no socket"):
        listener.bind()
    assert file.read_text() == "precious"
    listener.stop_taking(0)
    listener.join()


def test_a_stream_with_a_bad_token_is_refused_without_being_read(tmp_path):
    read = []

    def frames():
        for frame in put_frames(Prefix(bytes(32), range(30_000))):
            read.append(frame)
            yield frame

    with (
        serve_tenants(tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put", pb.PutFrame.SerializeToString)
        with pytest.raises(grpc.RpcError) as caught:
            call(frames(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(read) < 100
