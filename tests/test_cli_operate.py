"""Operators' commands against a real store, run inside this process."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from store_objects import GEOMETRY, Client, Prefix
from tiny_models import tiny_qwen
from typer.testing import CliRunner
from waiting import until

from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.payload import PayloadCodec
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.cli_io import is_left
from tailreplay.store.header import object_bytes
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind

KV, HIDDEN, CHECKPOINT = Kind
MIB = 1 << 20
IDS = list(range(1000))


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(pool_bytes=16 * MIB) as running:
        yield running


@pytest.fixture
def client(server):
    with closing(Client(server.address)) as client:
        yield client


@pytest.fixture
def prefix(client):
    """A stored prompt of a tenant of its own."""
    space = os.urandom(32)
    prefix = Prefix(space, IDS, tenant=tenant_digest(f"tenant-{space.hex()}"))
    client.put(prefix)
    return prefix


def name_of(prefix: Prefix) -> str:
    return f"tenant-{prefix.namespace.hex()}"


@pytest.fixture
def run(server):
    """Runs a command; JSON in the answer is parsed."""

    def run(*args: str, ids=None, code: int = 0):
        words = [*args, "--url", server.address, "--format", "json"]
        done = CliRunner().invoke(app, words, input=None if ids is None else json.dumps(ids))
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr

    run.url = server.address
    return run


def shown(server, *args: str) -> str:
    """The answer as a table."""
    done = CliRunner().invoke(app, [*args, "--url", server.address])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_query_counts_what_is_stored_by_kind(run, prefix):
    space = prefix.namespace.hex()
    answer = run("query", "-", "--namespace", space, ids=[*IDS[:700], 5, 6])
    assert (answer["prompt_tokens"], answer["matched_tokens"]) == (702, 700)
    assert answer["kv_tokens"] == answer["hidden_tokens"] == answer["kv_tokens_in_cpu"] == 700
    assert (answer["checkpoints"], answer["last_checkpoint"]) == (0, 0)
    nothing = run("query", "-", "--namespace", space, ids=[9], code=1)
    assert nothing.keys() == answer.keys()
    assert (nothing["matched_tokens"], nothing["kv_tokens_in_cpu"]) == (0, 0)
    assert run("query", "-", "--namespace", space, ids=IDS)["last_checkpoint"] == 1000


def test_a_command_that_ends_with_1_says_why_unless_it_is_to_be_quiet(server, prefix):
    space = prefix.namespace.hex()
    for words, said in (
        (["query", "-", "--namespace", space], "nothing of this prompt is stored"),
        (["unpin", "ab" * 16], f"there is no pin {'ab' * 16}"),
    ):
        words = [*words, "--url", server.address]
        for quiet in ([], ["-q"]):
            done = CliRunner().invoke(app, [*words, *quiet], input="[9]")
            assert done.exit_code == 1
            assert done.stderr == ("" if quiet else f"tailreplay-store: {said}\n")


def test_a_prompts_namespace_is_found_by_its_tenant(run, client, prefix):
    other = Prefix(os.urandom(32), range(2000, 2300), tenant=tenant_digest("somebody"))
    client.put(other)
    told = {n["namespace"]: n["tenant"] for n in run("describe")["namespaces"]}
    assert told[other.namespace.hex()] == other.tenant.hex()
    said = run("query", "-", ids=other.ids, code=1)
    assert "namespaces, wanted --namespace or --tenant to name one" in said
    assert f"{other.namespace.hex()}  300 tokens of tenant {other.tenant.hex()}" in said
    mine = ("--tenant", "somebody")
    for command in ("query", "inspect", "explain"):
        assert run(command, "-", *mine, ids=other.ids)["matched_tokens"] == 300
    made = run("pin", "-", "--tenant", other.tenant.hex(), "--digest", ids=other.ids)
    assert made["namespace"] == other.namespace.hex()
    run("unpin", made["pin_id"])
    assert "none is of the tenant" in run("query", "-", "--tenant", "nobody", ids=IDS, code=1)
    both = (*mine, "--namespace", other.namespace.hex())
    assert "both given, wanted one" in run("query", "-", *both, ids=IDS, code=2)
    client.put(Prefix(os.urandom(32), range(2000, 2100), tenant=other.tenant))
    said = run("query", "-", *mine, ids=other.ids, code=1)
    assert "has 2 namespaces of this tenant, wanted --namespace to name one" in said
    assert said.count(other.tenant.hex()) == 2


def test_a_tenant_that_is_not_known_is_said_to_be_none(run, prefix):
    for words in (("quota", "get"), ("quota", "delete"), ("kvcache", "clear", "--tenant")):
        run(*words, name_of(prefix))
        done = CliRunner().invoke(app, [*words, "nobody", "--url", run.url])
        assert done.exit_code == 1
        assert "this store knows no such tenant" in done.stderr
    for words in (("quota", "set", "later", "--cpu", "1MiB"), ("mode", "set", "later", "auto")):
        done = CliRunner().invoke(app, [*words, "--url", run.url])
        assert done.exit_code == 0
        assert "nothing of this tenant is stored as yet" in done.stderr
    run("mode", "set", "later", "unset")
    run("quota", "delete", "later")


def test_inspect_shows_objects(run, prefix):
    answer = run("inspect", "-", "--namespace", prefix.namespace.hex(), ids=IDS)
    assert answer["tenant"] == prefix.tenant.hex()
    assert len(answer["objects"]) == 4 + 16 + 1
    first = answer["objects"][0]
    assert (first["kind"], first["tiers"]) == ("kv", ["cpu"])
    assert first["prefix_hash"] == prefix.chain.prefix_hash(256).hex()


def test_a_prompt_is_pinned_listed_and_let_go(run, prefix):
    space = prefix.namespace.hex()
    made = run("pin", "-", "--namespace", space, "--for", "60", ids=IDS)
    assert made["objects"] == 21
    listed = {p["pin_id"]: p for p in run("pins")["pins"]}
    assert listed[made["pin_id"]]["bytes"] == made["bytes"]
    least = run("pin", "-", "--namespace", space, "--max-bytes", "1KiB", ids=IDS)
    assert (least["objects"], least["bytes"]) == (0, 0)
    assert run("pin", "-", "--max-bytes", "12MiB", "--namespace", space, ids=IDS)["objects"] == 21
    refused = run("pin", "-", "--namespace", space, "--max-bytes", "much", ids=IDS, code=2)
    assert "--max-bytes is 'much', wanted a size such as 512MiB" in refused
    assert run("unpin", made["pin_id"])["was_there"]
    assert not run("unpin", made["pin_id"], code=1)["was_there"]
    for wrong in ("x", "999", "ab12"):
        assert "wanted 32 hex digits (see `pins`)" in run("unpin", wrong, code=2)
    assert "--for is 0, wanted more than 0 seconds" in run(
        "pin", "-", "--for", "0", ids=IDS, code=2
    )


def test_a_pin_says_what_it_holds_in_tokens(run, server, prefix):
    space, block = prefix.namespace.hex(), object_bytes(GEOMETRY[KV], 256)
    options = ("--namespace", space, "--max-bytes", str(2 * block + 1))
    made = run("pin", "-", *options, ids=IDS)
    assert (made["tokens"], made["pinned_tokens"], made["objects"]) == (1000, 512, 2)
    assert made["left_out_bytes"] > 0
    assert "512 of 1000" in shown(server, "pins")
    run("unpin", made["pin_id"])


def test_a_quota_is_set_read_listed_and_deleted(run, server, prefix):
    tenant = name_of(prefix)
    before = run("quota", "get", tenant)
    assert (before["cpu_limit_bytes"], before["namespaces"]) == (None, 1)
    block = object_bytes(GEOMETRY[KV], 256)
    after = run("quota", "set", tenant, "--cpu", str(block))
    assert (after["cpu_limit_bytes"], after["redis_limit_bytes"]) == (block, None)
    refused = run("quota", "set", tenant, "--redis", "1KiB", code=1)
    assert "redis_bytes is 1024, and this store has no Redis" in refused
    assert after["cpu_bytes"] <= block
    assert after["evicted_bytes"] > 0
    listed = {t["tenant"]: t for t in run("quota", "list")["tenants"]}
    assert listed[prefix.tenant.hex()]["cpu_limit_bytes"] == block
    assert prefix.tenant.hex() in shown(server, "quota", "list")
    by_digest = run("quota", "get", prefix.tenant.hex(), "--digest")
    assert by_digest["cpu_limit_bytes"] == block
    assert run("quota", "delete", tenant)["cpu_limit_bytes"] is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12", 12),
        ("3k", 3072),
        ("2MiB", 2 * MIB),
        ("1 gib", 1 << 30),
        ("1TB", 10**12),
        ("1.5GiB", 3 << 29),
    ],
)
def test_sizes_have_units(run, text, size):
    assert run("quota", "set", "nobody", "--cpu", text)["cpu_limit_bytes"] == size
    run("quota", "delete", "nobody")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("quota", "set", "acme"), "no limit is given, wanted --cpu or --redis"),
        (("quota", "set", "acme", "--cpu", "-1"), "--cpu is '-1', wanted a size"),
        (("quota", "set", "acme", "--cpu", "9000000T"), "wanted less than 8 EiB"),
        (("quota", "get", "acme", "--digest"), "tenant is 'acme', wanted 32 hex digits"),
        (("quota", "get", ""), "tenant is empty"),
        (("kvcache", "clear"), "wanted one of --all, --namespace and --tenant"),
        (("kvcache", "clear", "--all", "--tenant", "a"), "wanted one of --all"),
        (("purge", "--namespace", "12"), "--namespace is '12', wanted 64 hex digits"),
        (("size", "--tokens", "9", "--shared", "10"), "--shared is 10, wanted at most --tokens, 9"),
        (("inspect", "-", "--namespace", "zz"), "--namespace is 'zz', wanted 64 hex digits"),
        (("public", "add"), "wanted a prompt or --hash"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_wanted(run, args, said):
    assert said in run(*args, ids=[1], code=2)


def test_purge_and_clear_take_what_they_are_told(run, client, prefix):
    assert run("purge", "--namespace", prefix.namespace.hex())["removed"]
    assert client.match(prefix).matched_tokens == 0
    client.put(prefix)
    assert run("kvcache", "clear", "--tenant", name_of(prefix))["removed"]
    assert client.match(prefix).matched_tokens == 0
    client.put(prefix)
    assert run("kvcache", "clear", "--namespace", prefix.namespace.hex())["removed"]
    client.put(prefix)
    run("kvcache", "clear", "--all")
    assert client.stats().pool_used_bytes == 0
    assert run("kvcache", "clear", "--all")["removed"] == []


def test_erase_proves_that_nothing_is_left(run, server, client, prefix):
    answer = run("erase", name_of(prefix))
    assert (answer["namespaces"], answer["cpu_objects_left"], answer["redis_keys_left"]) == (
        1,
        0,
        0,
    )
    assert client.match(prefix).matched_tokens == 0
    client.put(prefix)
    assert re.search("cpu_objects_left +0", shown(server, "erase", name_of(prefix)))
    client.put(prefix)
    block = object_bytes(GEOMETRY[KV], 256)
    held = server.store.tiers.pin([(prefix.name(KV, 256), block)], urgent=True, timeout_s=5)
    assert run("erase", name_of(prefix), code=1)["held_objects"] == 1
    server.store.tiers.unpin(held)


def test_erase_of_a_tenant_of_whom_nothing_is_known_proves_nothing(server, prefix):
    done = CliRunner().invoke(app, ["erase", "nobody", "--url", server.address])
    assert done.exit_code == 1
    assert "nothing is proved" in done.stderr


def test_a_mode_is_set_and_taken_back(run, client, prefix):
    assert run("mode", "set", name_of(prefix), "auto")["default_mode"] == "auto"
    assert client.match(prefix).default_mode == "auto"
    assert run("mode", "set", name_of(prefix), "unset")["default_mode"] == ""


def test_top_gives_rates_and_who_fills_the_pool(run, server, client, prefix, tmp_path):
    client.match(prefix)
    answer = run("top", "--looks", "1", "--every", "0.05")
    assert answer["at"]
    assert answer["pool_bytes"] == client.stats().pool_bytes
    assert prefix.tenant.hex() in {t["tenant"] for t in answer["tenants"]}
    assert answer["lookups_per_s"] == 0
    assert "lookups_per_s" in shown(server, "top", "--looks", "1", "--every", "0.05")
    file = tmp_path / "looks"
    for _ in range(2):  # the second run begins anew
        run("top", "--looks", "3", "--every", "0.05", "--output", str(file))
        assert len([json.loads(line) for line in file.read_text().splitlines()]) == 3


def test_top_counts_what_happens_between_two_looks():
    from tailreplay.store.cli_top import _rates

    before = pb.StatsResponse(lookups=10, queried_tokens=100, matched_tokens=50, stored_bytes=7)
    now = pb.StatsResponse(lookups=30, queried_tokens=300, matched_tokens=200, stored_bytes=27)
    rates = _rates(before, now, 2.0)
    assert (rates["lookups_per_s"], rates["matched_share"]) == (10, 0.75)
    assert rates["stored_bytes_per_s"] == 10
    restarted = _rates(now, before, 1.0)
    assert (restarted["lookups_per_s"], restarted["stored_bytes_per_s"]) == (10, 7)


def test_size_asks_a_store_what_a_token_costs(run, prefix):
    answer = run(
        "size", "--tokens", "5000", "--sessions", "10", "--shared", "3000",
        "--namespace", prefix.namespace.hex(),
    )  # fmt: skip
    kv, hidden, state = (GEOMETRY[kind].payload_bytes(1) for kind in (KV, HIDDEN, CHECKPOINT))
    assert answer["stored_tokens"] == 3000 + 10 * 2000
    assert answer["checkpoints"] == 2 + 10 * 3
    assert answer["total_without_hiddens_bytes"] == 23_000 * kv + 32 * state
    assert answer["total_with_hiddens_bytes"] == 23_000 * (kv + hidden) + 32 * state
    assert answer["least_for_exact_bytes"] == 23_000 * kv + 10 * state


@pytest.mark.model
def test_size_reads_a_models_config_as_engines_do(run, tmp_path):
    model = tiny_qwen()
    file = tmp_path / "config.json"
    file.write_text(model.config.to_json_string(use_diff=False))
    answer = run("size", "--tokens", "100", "--config", str(file), "--dtype", "float32")
    wanted = PayloadCodec(HybridModel(model).dims).geometry
    assert answer["kv_bytes_per_token"] == wanted[KV].payload_bytes(1)
    assert answer["hidden_bytes_per_token"] == wanted[HIDDEN].payload_bytes(1)
    assert answer["checkpoint_bytes"] == wanted[CHECKPOINT].payload_bytes(1)
    file.write_text('{"model_type": "llama"}')
    asked = ("size", "--tokens", "100", "--config", str(file))
    assert "model_type is 'llama'" in run(*asked, code=1)
    assert "--dtype is 'int8', wanted one of float32" in run(*asked, "--dtype", "int8", code=2)
    file.write_text('{"dtype": "int8"}')
    assert f"{file}: dtype is 'int8', wanted one of float32" in run(*asked, code=1)


def states(answer: dict) -> dict[str, str]:
    return {check["check"]: check["state"] for check in answer["checks"]}


def test_doctor_finds_nothing_wrong_with_a_store(run):
    found = states(run("doctor"))
    assert (found["socket"], found["store"], found["version"]) == ("ok", "ok", "ok")
    assert (found["redis"], found["clock"]) == ("skip", "ok")


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path):
    def doctor(path) -> str:
        done = CliRunner().invoke(app, ["doctor", "--url", f"unix://{path}"])
        assert done.exit_code == 1
        return done.stdout

    assert "No such file" in doctor(tmp_path / "none.sock")
    assert "start a store (`serve`)" in doctor(tmp_path / "none.sock")
    (tmp_path / "file").write_text("")
    assert "is no socket" in doctor(tmp_path / "file")
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    assert "UNAVAILABLE" in doctor(tmp_path / "dead.sock")


@pytest.mark.redis
def test_doctor_looks_at_redis(start_redis, tmp_path):
    redis_server = start_redis(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    listen = f"unix://{tmp_path}/store.sock"
    with (
        serve_in_thread(listen=listen, redis_url=redis_server.url) as server,
        closing(Client(server.address)) as client,
    ):
        prefix = Prefix(os.urandom(32), IDS)
        client.put(prefix)
        until(lambda: not client.stats().redis_pending_bytes)
        words = ["doctor", "--url", server.address, "--redis-url", redis_server.url]
        done = CliRunner().invoke(app, [*words, "--format", "json"])
        answer = json.loads(done.stdout)
        found = states(answer)
        assert (found["redis policy"], done.exit_code) == ("fail", 1)
        wanted = ("redis version", "redis memory", "redis lives")
        assert [found[name] for name in wanted] == ["ok"] * 3
        assert found["redis"] in ("ok", "warn")  # a busy machine may be slow to answer
        todo = next(c["todo"] for c in answer["checks"] if c["check"] == "redis policy")
        assert "noeviction" in todo
        told = CliRunner().invoke(app, [*words[:3], "--format", "json"])
        assert states(json.loads(told.stdout))["redis policy"] == "fail"
        elsewhere = [*words[:4], "redis://127.0.0.1:1"]
        assert "--redis-url names 127.0.0.1:1/0, the store has redis://" in (
            CliRunner().invoke(app, elsewhere).stdout
        )
        redis_server.kill()
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1
        assert "start it, or mend its address" in done.stdout


@pytest.mark.redis
def test_doctor_looks_at_each_of_several_servers_with_the_stores_own_login(
    start_redis, tmp_path, monkeypatch
):
    good, other = start_redis(requirepass="hush"), start_redis(requirepass="hush")
    (tmp_path / "password").write_text("hush")
    words = ["doctor", "--url", f"unix://{tmp_path}/none.sock", "--redis-url"]
    words.append(f"{good.url} {other.url}")
    words += ["--format", "json"]

    def about_redis() -> list[tuple[str, str]]:
        answer = json.loads(CliRunner().invoke(app, words).stdout)
        return [(c["state"], c["found"]) for c in answer["checks"] if c["check"] == "redis"]

    assert [state for state, _ in about_redis()] == ["fail", "fail"]
    monkeypatch.setenv("TAILREPLAY_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    other.kill()
    (first, found), (second, _) = about_redis()
    assert first in ("ok", "warn")
    assert second == "fail"
    assert found.startswith(f"{good.url}: answers in")
    monkeypatch.setenv("TAILREPLAY_REDIS_PASSWORD_FILE", str(tmp_path / "none"))
    assert [state for state, _ in about_redis()] == ["fail"]


def test_an_erasure_is_not_over_while_a_store_is_silent():
    assert not is_left(pb.EraseResponse(stores=2, redis_keys_deleted=3))
    for left in (
        "silent_stores",
        "cpu_objects_left",
        "redis_keys_left",
        "held_objects",
        "bulk_files_left",
    ):
        assert is_left(pb.EraseResponse(**{left: 1}))
        assert is_left(pb.RemovePublicResponse(**{left: 1}))


def written_to(stdout, *words):
    """A command in a process of its own, whose standard output is a file."""
    command = [sys.executable, "-P", "-m", "tailreplay.store.cli", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)


@pytest.mark.parametrize("form", ["json", "terminal"])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(server, form):
    read, write = os.pipe()
    os.close(read)
    words = ["stats", "--watch", "0.1", "--url", server.address, "--format", form]
    with os.fdopen(write) as closed:
        done = written_to(closed, *words)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_has_seen_enough_does_not_change_what_a_command_tells(server, prefix):
    file = f"/proc/{os.getpid()}/fd/%d"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed, open(os.memfd_create("prompt"), "w+") as prompt:
        prompt.write("[9]")
        prompt.flush()
        words = ["query", file % prompt.fileno(), "--namespace", prefix.namespace.hex()]
        done = written_to(closed, *words, "--url", server.address)
    assert (done.returncode, b"nothing of this prompt" in done.stderr) == (1, True)


def test_a_full_standard_output_is_named(server):
    words = ["ping", "--url", server.address, "--format", "json"]
    with open("/dev/full", "w") as full:
        done = written_to(full, *words)
    assert b"standard output can not be written: No space left" in done.stderr
