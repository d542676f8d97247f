"""What a command says where TLS is misused: the address, the flag, and what was wanted."""

import grpc
import pytest
from certificates import Authority
from tokens_file import TENANTS, bearer, write_tokens
from typer.testing import CliRunner
from waiting import until

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.tokens import extended_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    bearer(folder, "root")
    write_tokens(folder / "tokens.json", **TENANTS)
    return folder


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder)


@pytest.fixture(scope="module")
def other(folder):
    return Authority(folder, "other")


@pytest.fixture(scope="module")
def serving(folder, authority):
    """Stores at TCP ports: with TLS, with client certificates, and in the clear."""
    cert, key = authority.issue("server")
    tls = {"tls_cert": cert, "tls_key": key, "token_file": folder / "tokens.json"}
    small = {"listen": "127.0.0.1:0", "pool_bytes": 4 << 20}
    with (
        serve_in_thread(**small, **tls) as secured,
        serve_in_thread(**small, **tls, tls_client_ca=authority.cert) as mutual,
        serve_in_thread(**small) as clear,
    ):
        yield {"secured": secured, "mutual": mutual, "clear": clear}


def said_by(server, *options) -> str:
    done = CliRunner().invoke(app, [*map(str, options), "ping", "--url", server.address])
    assert done.exit_code == 1, done.output
    assert server.address in done.stderr
    for word in ("grpc", "ssl", "handshake", "peer"):  # nothing of gRPC's wording
        assert word not in done.stderr.lower()
    return done.stderr


def test_a_plain_client_is_told_to_name_the_ca(serving):
    for which in ("secured", "mutual"):
        assert "speaks TLS, and you do not: wanted --ca" in said_by(serving[which])


def test_a_client_with_a_ca_is_told_that_the_store_speaks_no_tls(serving, authority):
    said = said_by(serving["clear"], "--ca", authority.cert)
    assert "speaks no TLS: wanted no --ca, or a store with tls_cert" in said


def test_the_wrong_ca_is_named(serving, other):
    said = said_by(serving["secured"], "--ca", other.cert)
    assert f"a certificate that --ca {other.cert} does not vouch for" in said
    assert "wanted the CA that has signed it" in said


def test_a_missing_client_certificate_is_asked_for(serving, authority):
    said = said_by(serving["mutual"], "--ca", authority.cert)
    assert "asks clients for a certificate (its tls_client_ca): wanted --cert and --key" in said


def test_a_client_certificate_of_another_ca_is_named(serving, authority, other):
    cert, key = other.issue("stranger")
    said = said_by(serving["mutual"], "--ca", authority.cert, "--cert", cert, "--key", key)
    assert f"does not take --cert {cert}: wanted one that its tls_client_ca has signed" in said


def test_what_is_right_gets_through(serving, folder, authority):
    cert, key = authority.issue("client")
    options = ["--ca", authority.cert, "--token-file", folder / "root.token"]
    for which, more in (("secured", []), ("mutual", ["--cert", cert, "--key", key])):
        words = [*map(str, options + more), "ping", "-q", "--url", serving[which].address]
        assert CliRunner().invoke(app, words).exit_code == 0


def test_where_nobody_listens_tls_is_not_blamed(authority):
    done = CliRunner().invoke(app, ["--ca", str(authority.cert), "ping", "--url", "127.0.0.1:1"])
    assert (done.exit_code, "UNAVAILABLE" in done.stderr) == (1, True)
    assert isinstance(done.exception, SystemExit)
    assert grpc.StatusCode.UNAVAILABLE.name in done.stderr


def test_an_engine_has_it_in_its_log(serving, caplog):
    with StoreClient(serving["secured"].address) as client:
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                client.match(bytes(32), extended_tokens([1]))
        wanted = "speaks TLS, and you do not: wanted ca with the CA of its certificate"
        until(lambda: any(wanted in record.getMessage() for record in caplog.records))


def test_doctor_says_it_too_and_looks_at_operators_by_their_address(serving, authority):
    words = ["doctor", "--url", serving["secured"].address]
    done = CliRunner().invoke(app, words)
    assert "speaks TLS, and you do not: wanted --ca" in done.stdout
    assert "name their address with --admin-url" in done.stdout
    done = CliRunner().invoke(app, [*words, "--admin-url", serving["mutual"].address])
    assert done.stdout.count("speaks TLS, and you do not") == 2
