"""What a store says over HTTP: probes, and figures that add up."""

import http.client
import socket
import ssl
import threading
from contextlib import closing

import pytest
from certificates import Authority
from lane_objects import put
from prometheus_client.parser import text_string_to_metric_families
from store_objects import Prefix, span_range
from tokens_file import serve_tenants
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.auth import Access
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.http_listener import Answer, HttpListener
from tailreplay.store.objects import Kind
from tailreplay.store.probes import Probes

WAIT_S = 20
HTTP = {"http_listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(**HTTP) as running:
        yield running


def ask(address, path, *, method="GET", token=None, tls=None):
    host, _, port = address.rpartition(":")
    if tls is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=WAIT_S, context=tls)
    with closing(connection):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def figures(address, **how):
    """Values by name and labels."""
    status, text = ask(address, "/metrics", **how)
    assert status == 200
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_store_that_serves_is_alive_and_ready(server):
    assert ask(server.http_address, "/healthz") == (200, "alive\n")
    assert ask(server.http_address, "/readyz?verbose") == (200, "ready\n")
    assert ask(server.http_address, "/readyz", method="HEAD") == (200, "")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/run_script", 404), ("POST", "/healthz", 405)],
)
def test_there_is_nothing_else(server, method, path, status):
    assert ask(server.http_address, path, method=method)[0] == status


def test_figures_add_up_in_every_answer(server):
    prefix = Prefix(bytes(range(32)), range(1, 301))
    other = Prefix(bytes(range(32)), [9, *range(1, 100)])
    before = figures(server.http_address)
    with StoreClient(server.address, match_timeout_s=WAIT_S) as client:
        put(client, prefix)
        stop = threading.Event()

        def look_up():
            while not stop.is_set():
                client.match(prefix.namespace, prefix.tokens)
                client.match(other.namespace, other.tokens)

        asking = threading.Thread(target=look_up)
        asking.start()
        try:
            for _ in range(20):
                now = figures(server.http_address)
                assert now["tailreplay_lookups_total",] == (
                    now["tailreplay_hits_total",] + now["tailreplay_misses_total",]
                )
                assert now["tailreplay_queried_tokens_total",] == (
                    now["tailreplay_matched_tokens_total",]
                    + now["tailreplay_unmatched_tokens_total",]
                )
            until(lambda: figures(server.http_address)["tailreplay_misses_total",] > 0)
        finally:
            stop.set()
            asking.join()
        leaf = client.match(prefix.namespace, prefix.tokens).leaf
        wanted = span_range(Kind.KV, 0, 300)
        served = sum(
            record.units * record.rows * record.row_bytes
            for record, _ in client.fetch(prefix.namespace, leaf, [wanted], timeout_s=WAIT_S)
        )
        stats = client.stats()
    after = figures(server.http_address)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["tailreplay_stored_bytes_total",] == sum(
        len(prefix.object(*span)) for span in prefix.spans()
    )
    assert grown["tailreplay_served_bytes_total",] == served
    assert after["tailreplay_lookups_total",] == stats.lookups
    tiers = {key[1:]: value for key, value in after.items() if key[0] == "tailreplay_tier_bytes"}
    assert len(tiers) == 6
    assert tiers["cpu", "kv"] == sum(len(prefix.object(*s)) for s in prefix.spans(Kind.KV))
    assert sum(v for k, v in tiers.items() if "cpu" in k) <= after["tailreplay_pool_used_bytes",]


def test_figures_are_for_whoever_has_the_token(tmp_path):
    with serve_tenants(tmp_path, **HTTP) as server:
        assert ask(server.http_address, "/healthz")[0] == 200
        for token, status in (
            (None, 401),
            ("nobody", 401),
            ("token-acme", 403),
            ("token-scraper", 200),
            ("token-root", 200),
        ):
            found, text = ask(server.http_address, "/metrics", token=token)
            assert found == status
            assert "tailreplay_lookups" in text or status != 200
            assert token is None or token not in text


def test_tls_is_spoken_where_grpc_speaks_it_and_probes_need_no_certificate(tmp_path):
    ca = Authority(tmp_path)
    cert, key = ca.issue("server")
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca.cert}
    with serve_in_thread(listen="127.0.0.1:0", **tls, **HTTP) as server:
        context = ssl.create_default_context(cafile=ca.cert)
        assert ask(server.http_address, "/readyz", tls=context)[0] == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(server.http_address, "/readyz")


def test_a_store_that_starts_or_drains_is_alive_and_not_ready():
    probes = Probes("127.0.0.1:0", Access(None), None)
    try:
        assert ask(probes.address, "/healthz")[0] == 200
        assert ask(probes.address, "/readyz") == (503, "starting\n")
        probes.drain()
        assert ask(probes.address, "/readyz") == (503, "draining\n")
        assert ask(probes.address, "/metrics")[0] == 200
    finally:
        probes.close()


def test_an_address_that_is_taken_is_a_message():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StoreUnavailable, match="can not listen at"),
    ):
        Probes(f"127.0.0.1:{taken.getsockname()[1]}", Access(None), None)


@pytest.fixture
def pages():
    def fails(_):
        raise RuntimeError("no such luck")

    listener = HttpListener(
        "127.0.0.1:0", {"/": lambda token: Answer(200, token.encode()), "/fails": fails}, None
    )
    yield listener
    listener.close()


def reply(listener, data):
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as sock:
        sock.sendall(data)
        came = b""
        try:
            while chunk := sock.recv(1 << 16):
                came += chunk
        except ConnectionError:
            pass
        return came


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /fails HTTP/1.1\r\n\r\n", b"500"),
        (b"\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET  / HTTP/1.1\r\n\r\n", b"400"),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /%00 HTTP/1.1\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nnonsense\r\n:\r\n\r\n", b"200"),
    ],
)
def test_malformed_requests_are_answered_or_dropped(pages, data, status):
    assert reply(pages, data)[9:12] == status
    assert reply(pages, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 200")


def test_two_tokens_are_none(pages):
    both = b"GET / HTTP/1.1\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n"
    assert reply(pages, both).endswith(b"\r\n\r\n")
    assert reply(pages, both.replace(b"authorization", b"other")).endswith(b"Bearer a")


def test_a_crowd_that_says_nothing_keeps_nobody_out(pages):
    host, _, port = pages.address.rpartition(":")
    crowd = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(100)]
    try:
        assert reply(pages, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 200")
        until(lambda: len(pages._open) <= 33)
    finally:
        for sock in crowd:
            sock.close()
