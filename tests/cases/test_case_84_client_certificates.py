"""Mooncake#1147, #1155: client certificates between a store and its clients, asked for in vain."""

import lane_objects
import pytest
from certificates import Authority
from lane_objects import WAIT_S
from store_objects import Prefix, span_range

from tailreplay.connector.client import StoreClient
from tailreplay.connector.vllm_config import VllmSettings
from tailreplay.store import serve_in_thread
from tailreplay.store.credentials import Credentials
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind

PREFIX = Prefix(bytes(range(32)), range(1, 301))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case84")
    ca = Authority(folder)
    cert, key = ca.issue("store")
    with serve_in_thread(
        listen="127.0.0.1:0", tls_cert=cert, tls_key=key, tls_client_ca=ca.cert
    ) as server:
        yield server, ca


def test_a_client_with_a_certificate_is_served(served):
    server, ca = served
    cert, key = ca.issue("engine")
    extra = {"credentials": {"ca": str(ca.cert), "cert": str(cert), "key": str(key)}}
    credentials = VllmSettings.model_validate(extra).credentials  # as vLLM is told
    with StoreClient(server.address, credentials=credentials, match_timeout_s=WAIT_S) as client:
        lane_objects.put(client, PREFIX)
        wanted = span_range(Kind.KV, 0, 300)
        assert lane_objects.fetch(client, PREFIX, wanted)[0] == [PREFIX.rows(Kind.KV, 0, 300)]


@pytest.mark.parametrize("shown", ["nothing", "its own", "in the clear"])
def test_a_client_without_one_of_the_authoritys_is_refused(served, shown, tmp_path):
    server, ca = served
    own = Authority(tmp_path, "own").issue("engine")
    credentials = {
        "nothing": Credentials(ca=ca.cert),
        "its own": Credentials(ca=ca.cert, cert=own[0], key=own[1]),
        "in the clear": Credentials(),
    }[shown]
    with (
        StoreClient(server.address, credentials=credentials, match_timeout_s=2) as client,
        pytest.raises(StoreUnavailable),
    ):
        client.match(PREFIX.namespace, PREFIX.tokens)
