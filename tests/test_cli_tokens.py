"""Commands where callers have tokens: whose namespaces they find, and what is public."""

import json
from importlib.metadata import version

import pytest
from store_objects import Prefix, put_frames
from tokens_file import bearer, serve_tenants
from typer.testing import CliRunner

from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.cli import app
from tailreplay.store.namespace import tenant_digest

SPACE = bytes(range(32))
SYSTEM = Prefix(SPACE, range(700))
OWN = Prefix(SPACE, range(5000, 5400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def server(folder):
    with serve_tenants(folder, pool_bytes=16 << 20) as running:
        for name, prefix in (("root", SYSTEM), ("acme", OWN)):
            with bearer(folder, name).channel(running.address, []) as channel:
                rpc.StoreStub(channel).Put(put_frames(prefix), timeout=20)
        yield running


@pytest.fixture
def run(server, folder):
    """Runs a command with the token of `name`; JSON in the answer is parsed."""

    def run(name: str, *args: str, ids=None, code: int = 0):
        bearer(folder, name)
        words = ["--token-file", str(folder / f"{name}.token"), *args]
        words += ["--url", server.address, "--format", "json"]
        done = CliRunner().invoke(app, words, input=None if ids is None else json.dumps(ids))
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr

    return run


def test_a_tenant_asks_for_its_own_namespace_without_naming_it(run):
    assert run("acme", "query", "-", ids=OWN.ids)["matched_tokens"] == 400
    assert run("acme2", "explain", "-", ids=OWN.ids)["matched_tokens"] == 400
    said = run("rival", "query", "-", ids=OWN.ids, code=1)
    assert "nothing is stored yet, or nothing with your token" in said
    assert "wanted --namespace, as engines call it" in said


def test_an_administrator_asks_for_the_public_scope_without_naming_it(run):
    assert run("root", "query", "-", ids=SYSTEM.ids)["matched_tokens"] == 700
    told = {n["is_public"]: n for n in run("root", "describe")["namespaces"]}
    assert told[True]["sent_namespace"] == told[False]["sent_namespace"] == SPACE.hex()
    assert run("root", "inspect", "-", ids=OWN.ids, code=1).count("has 2 namespaces") == 1
    named = ("--namespace", told[False]["namespace"])
    assert run("root", "inspect", "-", *named, ids=OWN.ids)["matched_tokens"] == 400
    for called in (told[True]["namespace"], SPACE.hex()):
        asked = ("query", "-", "--namespace", called)
        assert run("root", *asked, ids=SYSTEM.ids)["matched_tokens"] == 700
    said = run("root", "inspect", "-", "--namespace", SPACE.hex(), ids=OWN.ids, code=1)
    assert "engines call 2 of the store's namespaces" in said


def test_a_prefix_is_opened_listed_and_closed(run, server):
    asked = ("query", "-", "--namespace", SPACE.hex())
    assert run("rival", *asked, ids=SYSTEM.ids, code=1)["matched_tokens"] == 0
    made = run("root", "public", "add", "-", ids=SYSTEM.ids)
    assert (made["tokens"], made["stored_tokens"]) == (512, 512)
    assert made["prefix_hash"] == SYSTEM.chain.prefix_hash(512).hex()
    assert run("rival", *asked, ids=SYSTEM.ids)["matched_tokens"] == 512
    first = SYSTEM.chain.prefix_hash(256).hex()
    assert run("root", "public", "add", "--hash", first)["tokens"] == 256
    listed = run("root", "public", "list")["prefixes"]
    assert [p["prefix_hash"] for p in listed] == [made["prefix_hash"], first]
    assert run("root", "public", "remove", first)["kept_tokens"] == 256
    gone = run("root", "public", "remove", made["prefix_hash"])
    assert (gone["cpu_objects_left"], gone["kept_tokens"]) == (0, 0)
    assert run("rival", *asked, ids=SYSTEM.ids, code=1)["matched_tokens"] == 0
    said = run("root", "public", "remove", made["prefix_hash"], code=1)
    assert "wanted one of `public list`" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add",), "wanted a prompt or --hash"),
        (("add", "-", "--hash", "00"), "wanted a prompt or --hash"),
        (("add", "--hash", "x"), "hash is 'x', wanted 64 hex digits"),
        (("remove", "zz"), "hash is 'zz', wanted 64 hex digits"),
        (("remove", ""), "hash is '', wanted 64 hex digits"),
    ],
)
def test_what_is_wrong_with_a_prefix_is_said(run, words, said):
    assert said in run("root", "public", *words, ids=[1], code=2)


def test_public_prefixes_are_shown_as_a_table(run, server, folder):
    run("root", "public", "add", "-", "--namespace", SPACE.hex(), ids=list(range(256)))
    words = ["--token-file", str(folder / "root.token"), "public", "list", "--url", server.address]
    shown = CliRunner().invoke(app, words).stdout
    assert Prefix(SPACE, range(256)).chain.prefix_hash(256).hex() in shown


def test_ping_answers_everybody(server, folder):
    done = CliRunner().invoke(app, ["ping", "--url", server.address, "--format", "json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["serving"], told["version"]) == (0, True, None)


def test_ping_tells_those_with_a_token_the_version(run):
    assert run("acme", "ping")["version"] == version("tailreplay")


def test_a_tenant_is_shown_no_settings_and_no_capacity(run, server, folder):
    (space,) = run("acme", "describe")["namespaces"]
    assert (space["capacity_tokens"], space["tenant"]) == (None, tenant_digest("acme").hex())
    words = ["--token-file", str(folder / "acme.token"), "describe", "--url", server.address]
    assert "settings in force" not in CliRunner().invoke(app, words).stdout


def states(answer: dict) -> dict[str, tuple[str, str]]:
    return {check["check"]: (check["state"], check["todo"]) for check in answer["checks"]}


def test_doctor_says_who_may_operate(run, server, tmp_path):
    assert states(run("root", "doctor"))["operators"][0] == "ok"
    state, todo = states(run("acme", "doctor"))["operators"]
    assert (state, "--token-file" in todo) == ("warn", True)
    elsewhere = ("--admin-url", f"unix://{tmp_path}/none.sock")
    state, todo = states(run("root", "doctor", *elsewhere, code=1))["operators"]
    assert (state, todo) == ("fail", "set admin_listen, or name it with --admin-url")
