"""Tokens: who is let in, what each role may do, and that nothing says a token aloud."""

import hashlib
import json
import logging

import pytest
from tokens_file import TENANTS, write_tokens

from tailreplay.store.auth import ANYONE, Access, Role, allow
from tailreplay.store.config import StoreConfig, explained
from tailreplay.store.errors import NotAllowed, NotAuthenticated

SPACE = bytes(range(32))


@pytest.fixture
def file(tmp_path):
    return write_tokens(tmp_path / "tokens.json", **TENANTS)


def sent(token):
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_without_a_token_file_everybody_is_anyone():
    access = Access(None)
    assert access.is_open
    assert access.principal([]) is ANYONE
    assert access.principal(sent("whatever")) is ANYONE
    assert ANYONE.scoped(SPACE) == SPACE


def test_a_token_says_who_its_bearer_is(file):
    access = Access(file)
    acme = access.principal(sent("token-acme"))
    assert (acme.role, acme.tenant, acme.shared_memory) == (Role.TENANT, "acme", False)
    assert access.principal(sent("token-sharer")).shared_memory
    assert access.principal(sent("token-root")).role is Role.ADMIN


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        sent(""),
        sent("token-acm"),
        sent("token-acme "),
        sent("Token-acme"),
        sent(hashlib.sha256(b"token-acme").hexdigest()),
        [("authorization", "token-acme")],
        [("authorization", "Basic token-acme")],
        [("authorization", b"Bearer token-acme")],
        [*sent("token-acme"), *sent("token-acme")],
        sent("\udcff\x00"),
    ],
)
def test_any_other_token_is_refused(file, metadata):
    with pytest.raises(NotAuthenticated):
        Access(file).principal(metadata)


def test_no_two_tenants_and_no_two_roles_share_a_namespace(file):
    access = Access(file)
    spaces = [
        access.bearer(f"token-{name}").scoped(SPACE) for name in ("acme", "rival", "sharer", "root")
    ]
    assert len({*spaces, SPACE}) == 5
    assert access.bearer("token-acme2").scoped(SPACE) == spaces[0]
    assert spaces[3] == access.bearer("token-acme").public(SPACE)
    assert access.bearer("token-root").public(SPACE) is None is ANYONE.public(SPACE)


def test_names_of_tenants_can_not_be_put_together_into_another(tmp_path):
    """A tenant's name and what it sends never run into each other."""
    names = {"a": {"tenant": "a"}, "ab": {"tenant": "ab"}}
    access = Access(write_tokens(tmp_path / "t.json", **names))
    assert access.bearer("token-a").scoped(b"b" + bytes(31)) != access.bearer("token-ab").scoped(
        bytes(31) + b"b"
    )


def test_a_changed_file_counts_from_the_next_call_on(file):
    access = Access(file)
    known = access.bearer("token-acme")
    write_tokens(file, fresh={"tenant": "fresh"})
    assert access.bearer("token-fresh").tenant == "fresh"
    for refused in (lambda: access.bearer("token-acme"), lambda: access.current(known)):
        with pytest.raises(NotAuthenticated):
            refused()


def test_a_token_that_changed_hands_is_no_longer_the_old_bearers(file):
    access = Access(file)
    known = access.bearer("token-acme")
    write_tokens(file, acme={"tenant": "other"})
    with pytest.raises(NotAuthenticated):
        access.current(known)


@pytest.mark.parametrize("broken", ["", "{", '{"tokens": [{"sha256": "ab"}]}', None])
def test_a_file_that_can_not_be_read_changes_nothing(file, broken, caplog):
    access = Access(file)
    file.unlink() if broken is None else file.write_text(broken)
    with caplog.at_level(logging.WARNING):
        assert access.bearer("token-acme").tenant == "acme"
        assert access.bearer("token-acme").tenant == "acme"
    assert len(caplog.records) == 1
    write_tokens(file, fresh={"tenant": "fresh"})
    assert access.bearer("token-fresh").tenant == "fresh"


@pytest.mark.parametrize(
    "entry",
    [
        {"role": "tenant"},
        {"role": "admin", "tenant": "acme"},
        {"role": "root"},
        {"tenant": "a b"},
        {"tenant": "x" * 65},
        {"tenant": "acme", "more": 1},
    ],
)
def test_a_malformed_entry_is_refused_at_start_without_its_digest(tmp_path, entry):
    file = write_tokens(tmp_path / "t.json", bad=entry)
    with pytest.raises(ValueError, match=r"token file .*t\.json") as caught:
        Access(file)
    assert hashlib.sha256(b"token-bad").hexdigest() not in str(caught.value)


def test_one_token_is_not_two_tenants(tmp_path):
    file = write_tokens(tmp_path / "t.json", acme={"tenant": "acme"})
    (entry,) = json.loads(file.read_text())["tokens"]
    file.write_text(json.dumps({"tokens": [entry, entry | {"tenant": "rival"}]}))
    with pytest.raises(ValueError, match="listed twice"):
        Access(file)


def test_roles_may_do_what_is_theirs(file):
    access = Access(file)
    allow(ANYONE, Role.ADMIN)
    allow(access.bearer("token-root"), Role.ADMIN)
    with pytest.raises(NotAllowed, match="role is tenant, wanted admin or metrics"):
        allow(access.bearer("token-acme"), Role.ADMIN, Role.METRICS)


TLS = {"tls_cert": "c.pem", "tls_key": "k.pem"}
TOKENS = {"token_file": "t.json"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"listen": "127.0.0.1:0"},
        {"listen": "[::1]:0"},
        {"listen": "localhost:7"},
        {"listen": "0.0.0.0:7", **TLS, **TOKENS},
        {"listen": "0.0.0.0:7", "allow_insecure_listen": True},
        {"admin_listen": "127.0.0.1:7", **TOKENS},
        {"admin_listen": "unix:///tmp/a.sock"},
        {"http_listen": "127.0.0.1:7"},
        {"http_listen": "0.0.0.0:7", **TLS, **TOKENS},
    ],
)
def test_listeners_that_are_safe_are_taken(settings):
    StoreConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "0.0.0.0:7"}, "listen is '0.0.0.0:7': beyond loopback it needs"),
        ({"listen": "0.0.0.0:7", **TLS}, "token_file"),
        ({"listen": "10.0.0.1:7", **TOKENS}, "tls_cert"),
        ({"listen": "[::]:7"}, "beyond loopback"),
        ({"listen": "store.example:7"}, "beyond loopback"),
        ({"listen": "127.0.0.1.example:7"}, "beyond loopback"),
        ({"admin_listen": "127.0.0.1:7"}, "TCP needs token_file"),
        ({"admin_listen": "127.0.0.1:7", "allow_insecure_listen": True}, "TCP needs token_file"),
        ({"admin_listen": "0.0.0.0:7", **TOKENS}, "admin_listen is"),
        ({"http_listen": "0.0.0.0:7"}, "http_listen is"),
        ({"http_listen": "unix:///tmp/h"}, "wanted host:port"),
        ({"tls_cert": "c.pem"}, "go together"),
        ({"tls_client_ca": "c.pem"}, "tls_client_ca is set without"),
    ],
)
def test_listeners_that_are_not_safe_are_refused(settings, message):
    with pytest.raises(ValueError, match=r".") as caught:
        StoreConfig(**settings)
    assert message in explained(caught.value)
