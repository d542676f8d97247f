"""Who gets through which door with a client certificate."""

import os
import socket
from contextlib import ExitStack, closing

import pytest
from certificates import Authority
from listener_clients import PREFIX, WAIT_S, client_of, fetch, put
from store_objects import Prefix
from tokens_file import bearer, serve_tenants
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.credentials import Credentials
from tailreplay.store.errors import (
    StoreUnavailable,
)
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    VERSION,
    connect,
)
from tailreplay.store.objects import Kind


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    ca, rogue = Authority(folder), Authority(folder, "rogue")
    cert, key = ca.issue("server")
    with serve_tenants(
        folder,
        listen="127.0.0.1:0",
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=ca.cert,
        stall_limit_s=60,
    ) as server:
        yield server, folder, ca, rogue


def tls_credentials(folder, ca, name="acme", client="engine"):
    cert, key = ca.issue(client) if client else (None, None)
    return bearer(folder, name, ca=ca.cert, cert=cert, key=key)


def test_a_client_with_a_certificate_and_a_token_is_served_over_grpc_and_lane(over_tls):
    server, folder, ca, _ = over_tls
    credentials = tls_credentials(folder, ca)
    for lanes in (True, False):
        prefix = Prefix(os.urandom(32), range(1, 301))
        with client_of(server.address, credentials, lanes=lanes) as client:
            assert put(client, prefix).stored == len(prefix.spans())
            rows, _, over_lane = fetch(client, prefix)
            assert (rows, over_lane) == (prefix.rows(Kind.KV, 0, 300), lanes)


def strangers(folder, ca, rogue):
    own, rogue_pair = ca.issue("engine"), rogue.issue("impostor")
    token = bearer(folder, "acme").token_file
    return {
        "no certificate": {"ca": ca.cert, "token_file": token},
        "certificate of another authority": {
            "ca": ca.cert,
            "cert": rogue_pair[0],
            "key": rogue_pair[1],
            "token_file": token,
        },
        "store of another authority": {
            "ca": rogue.cert,
            "cert": own[0],
            "key": own[1],
            "token_file": token,
        },
        "in the clear": {"token_file": token},
    }


@pytest.mark.parametrize(
    "stranger",
    [
        "no certificate",
        "certificate of another authority",
        "store of another authority",
        "in the clear",
    ],
)
def test_a_stranger_is_refused_by_grpc_and_by_the_lane(over_tls, stranger):
    server, folder, ca, rogue = over_tls
    credentials = Credentials(**strangers(folder, ca, rogue)[stranger])
    with (
        closing(StoreClient(server.address, credentials=credentials, match_timeout_s=2)) as client,
        pytest.raises(StoreUnavailable),
    ):
        client.match(PREFIX.namespace, PREFIX.tokens)
    with client_of(server.address, tls_credentials(folder, ca)) as friend:
        answer = friend._open_lane()  # a good ticket does not help
    lane = server.address.rpartition(":")[0] + answer.address
    assert not is_accepted(lane, credentials.context(), answer.ticket)


def is_accepted(lane, tls, ticket):
    """Whether a lane opens for a ticket."""
    try:
        with connect(lane, WAIT_S, tls) as sock:
            sock.sendall(HELLO.pack(MAGIC, VERSION, 0, ticket))
            return sock.recv(1) == b"\x01"
    except OSError:
        return False


def test_a_ticket_of_one_client_is_no_good_to_another(over_tls):
    server, folder, ca, _ = over_tls
    with client_of(server.address, tls_credentials(folder, ca)) as friend:
        answer, good = friend._open_lane(), friend._open_lane()
    lane = server.address.rpartition(":")[0] + answer.address
    other = tls_credentials(folder, ca, client="other")
    assert not is_accepted(lane, other.context(), answer.ticket)
    own = tls_credentials(folder, ca)  # the same name, another certificate
    assert not is_accepted(lane, own.context(), good.ticket)


def test_handshakes_that_are_never_made_keep_nobody_out(over_tls):
    """Neither those that say nothing nor those that speak something else."""
    server, folder, ca, _ = over_tls
    host, _, port = (server.address.rpartition(":")[0] + server._lane.address).rpartition(":")
    with ExitStack() as stack:
        for number in range(150):
            sock = stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            if number % 2:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        prefix = Prefix(os.urandom(32), range(1, 301))
        with client_of(server.address, tls_credentials(folder, ca)) as client:
            put(client, prefix)
            assert fetch(client, prefix)[2]
        assert len(server._lane._waiting) <= 64
    until(lambda: not server._lane._waiting)


def test_certificates_are_renewed_without_a_restart(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old.issue("server")
    with serve_in_thread(listen="127.0.0.1:0", tls_cert=cert, tls_key=key) as server:
        for authority in (old, new, old):
            authority.issue("server")
            for ca, served in ((authority, True), (new if authority is old else old, False)):
                credentials = Credentials(ca=ca.cert)
                with client_of(server.address, credentials) as client:
                    if served:
                        put(client)
                        assert fetch(client)[2]
                    else:
                        with pytest.raises(StoreUnavailable):
                            client.match(PREFIX.namespace, PREFIX.tokens, timeout_s=2)
