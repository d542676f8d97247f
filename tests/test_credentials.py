"""What a client does with files of its own that are of no use: it says so, and nothing of them."""

import logging

import pytest
from certificates import Authority
from listener_clients import PREFIX, client_of
from tokens_file import serve_tenants
from typer.testing import CliRunner

from tailreplay.store.cli import app
from tailreplay.store.credentials import Credentials
from tailreplay.store.errors import NotAuthenticated

NO_TOKENS = {
    "two lines": (b"s3cret\nolds3cret\n", "holds no token: wanted one line of printable ASCII"),
    "a store's file": (b'{\n "tokens": ["s3cret"]\n}\n', "holds no token: wanted one line"),
    "not ASCII": ("s3crét".encode(), "holds no token: wanted one line"),
    "not UTF-8": (b"s3cret\xff", "holds no token: wanted one line"),
    "control": (b"s3\0cret", "holds no token: wanted one line"),
    "empty": (b" \n", "is empty, wanted a token"),
    "absent": (None, "can not be read: No such file"),
}


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    with serve_tenants(folder) as server:
        yield server


@pytest.fixture(params=NO_TOKENS)
def no_token(request, tmp_path):
    """A file with no token in it, and what is said of it."""
    content, said = NO_TOKENS[request.param]
    file = tmp_path / "bad.token"
    if content is not None:
        file.write_bytes(content)
    return file, f"{file} {said}"


def test_a_command_says_what_is_wrong_with_a_token_file_and_nothing_of_it(with_tokens, no_token):
    file, said = no_token
    done = CliRunner().invoke(
        app, ["--token-file", str(file), "ping", "--url", with_tokens.address]
    )
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "cret" not in done.output


def test_a_client_goes_without_a_token_and_says_why_once(with_tokens, no_token, caplog):
    file, said = no_token
    credentials = Credentials(token_file=file)
    with caplog.at_level(logging.WARNING), client_of(with_tokens.address, credentials) as client:
        for _ in range(3):
            with pytest.raises(NotAuthenticated):
                client.match(PREFIX.namespace, PREFIX.tokens)
        file.write_text("token-acme\n")
        client.match(PREFIX.namespace, PREFIX.tokens)
    ours = [r.message for r in caplog.records if r.name == "tailreplay.store.credentials"]
    assert len(ours) == 1
    assert said in ours[0]
    assert "cret" not in caplog.text


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["--ca", "TOKEN"], "TOKEN is no PEM certificate"),
        (["--ca", "CA", "--cert", "TOKEN", "--key", "KEY"], "TOKEN is no PEM certificate"),
        (["--ca", "CA", "--cert", "CERT", "--key", "TOKEN"], "TOKEN is no PEM private key, or"),
        (
            ["--ca", "CA", "--cert", "CERT", "--key", "OTHER"],
            "OTHER is not the private key of",
        ),
        (["--ca", "ABSENT"], "ABSENT can not be read: No such file"),
        (["--cert", "CERT"], "cert and key go together, one of them is missing"),
    ],
)
def test_a_file_that_is_not_the_pem_it_is_given_for_is_named(tmp_path, parts, said, capfd):
    authority = Authority(tmp_path)
    (cert, key), (_, other) = authority.issue("own"), authority.issue("other")
    token = tmp_path / "acme.token"
    token.write_text("s3cret\n")
    files = {"TOKEN": token, "CA": authority.cert, "CERT": cert}
    files |= {"KEY": key, "OTHER": other, "ABSENT": tmp_path / "none.pem"}
    words = [str(files.get(part, part)) for part in parts]
    for name, file in files.items():
        said = said.replace(name, str(file))
    done = CliRunner().invoke(app, [*words, "ping", "--url", "127.0.0.1:1"])
    assert done.exit_code == (2 if "go together" in said else 1)
    assert done.stderr.startswith(f"tailreplay-store: {said}")
    assert done.stderr.count("\n") == 1
    assert capfd.readouterr().err == ""  # nothing of gRPC's own
