"""The command line: answers, formats, exit codes, and what it must not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import datetime
from importlib.metadata import version

import pytest
import typer
from rich.console import Console
from store_objects import Client, Prefix
from typer.testing import CliRunner

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables, serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.config import StoreConfig

COMMAND = [sys.executable, "-P", "-m", "tailreplay.store.cli"]


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """What a command says, run in this process."""
    done = CliRunner().invoke(app, args, input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # which would be a traceback
    return subprocess.CompletedProcess(args, done.exit_code, done.stdout, done.stderr)


def run_alone(*args: str) -> subprocess.CompletedProcess[str]:
    """What a command says as users run it."""
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def server():
    with serve_in_thread() as running:
        yield running


def test_starts_without_torch_and_lmcache():
    code = (
        "import sys, tailreplay.store.cli, tailreplay.connector\n"
        "heavy = {'torch', 'lmcache', 'transformers', 'vllm'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60)
    assert done.returncode == 0


def test_ping_says_whether_a_store_answers(server, tmp_path):
    assert run_alone("ping", "--url", server.address, "-q").returncode == 0
    absent = run_alone("ping", "--url", f"unix://{tmp_path}/none.sock")
    assert absent.returncode == 1
    assert "none.sock" in absent.stderr
    assert "Traceback" not in absent.stderr


def test_describe_gives_every_setting_in_force(server):
    answer = json.loads(run("describe", "--url", server.address, "--format", "json").stdout)
    assert set(type(server.store.config).model_fields) <= set(answer["settings"])
    table = run("describe", "--url", server.address).stdout
    assert all(name in table for name in answer["settings"])


def test_stats_are_numbers_in_json_and_a_table_otherwise(server, tmp_path):
    file = tmp_path / "stats.json"
    done = run("stats", "--url", server.address, "--format", "json", "--output", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    answer = json.loads(file.read_text())
    assert answer["lookups"] == answer["hits"] + answer["misses"]
    assert isinstance(answer["pool_bytes"], int)
    assert "lookups" in run("stats", "--url", server.address).stdout


def test_explain_says_what_is_stored_of_a_prompt(server, tmp_path):
    stored = Prefix(bytes(range(32)), range(300))
    client = Client(server.address)
    client.put(stored)
    client.close()
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*stored.ids[:257], 7, 7, 7]))
    options = ("--url", server.address, "--namespace", stored.namespace.hex())
    answer = json.loads(run("explain", str(prompt), *options, "--format", "json").stdout)
    assert answer["matched_tokens"] == 257
    assert [(r["first_token"], r["end_token"]) for r in answer["runs"]][:1] == [(0, 257)]
    assert "257" in run("explain", "-", *options, stdin=prompt.read_text()).stdout


def test_explain_finds_the_first_differing_token_of_two_prompts(tmp_path):
    # Case 15: a template drops a block from the history; 263 of 308 tokens are shared.
    first, second = list(range(308)), [*range(263), *range(290, 308)]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ids in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(ids))
    answer = json.loads(run("explain", *map(str, files), "--format", "json").stdout)
    assert answer["shared_tokens"] == answer["first_differing_position"] == 263
    assert (answer["token_in_first"], answer["token_in_second"]) == (263, 290)
    assert answer["tokens_to_prefill"] == len(second) - 263


@pytest.mark.parametrize(
    ("text", "said"),
    [("nonsense", "no JSON"), ('{"a": 1}', "array"), ("[1, -2]", "-2"), ("[1, 2.5]", "2.5")],
)
def test_explain_refuses_what_is_no_prompt(server, text, said):
    done = run("explain", "-", "--url", server.address, "--namespace", "00" * 32, stdin=text)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_store_with_nothing_stored_says_so():
    with serve_in_thread() as empty:
        done = run("query", "-", "--url", empty.address, stdin="[1, 2]")
    assert done.returncode == 1
    assert "nothing is stored yet, or nothing any more; wanted --namespace" in done.stderr


def test_a_store_without_tokens_says_that_nothing_can_be_public(server):
    answers = [
        run("public", "add", "-", "--url", server.address, *more, stdin="[1, 2]")
        for more in ((), ("--namespace", "00" * 32))
    ]
    assert [done.returncode for done in answers] == [1, 1]
    assert "asks for no tokens (token_file), so nothing in it can be public" in answers[0].stderr
    assert "no token_file: it knows no tenants, and nothing can be public" in answers[1].stderr


def test_explain_says_that_there_is_no_such_prompt(tmp_path):
    done = run("explain", str(tmp_path / "none.json"), str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "none.json can not be read" in done.stderr


@pytest.mark.parametrize(("text", "said"), [("[1]", "wanted an object"), ("{", "no JSON")])
def test_serve_refuses_a_file_that_holds_no_settings(tmp_path, text, said):
    file = tmp_path / "settings.json"
    file.write_text(text)
    done = run("serve", "--config", str(file))
    assert done.returncode == 1
    assert f"{file}" in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("file", ["/", "nowhere.json"])
def test_serve_says_that_a_file_of_settings_can_not_be_read(file):
    done = run("serve", "--config", file)
    assert done.returncode == 1
    assert f"{file} can not be read" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--pool-bytes", "12"], "--pool-bytes is '12', wanted at least 4194304"),
        (["--listen", "127.0.0.1:99999"], "a port from 0 to 65535"),
        (["--listen", "http://x"], "wanted unix:///path/to.sock or host:port"),
        (["--listen", "unix:///" + "x" * 107], "wanted at most 107"),
    ],
)
def test_serve_refuses_a_wrong_setting_by_name(args, said):
    done = run("serve", *args)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--listen", "unix:///proc/none/store.sock"], "can not listen at /proc/none/store.sock"),
        (["--pool-bytes", str(1 << 50)], f"pool_bytes is {1 << 50}, wanted at most"),
    ],
)
def test_serve_says_what_it_can_not_have(args, said):
    done = run_alone("serve", *args)
    assert done.returncode == 1
    assert said in done.stderr
    assert "starting tailreplay" in done.stderr
    assert "reserving" not in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_a_variable_that_holds_no_json(monkeypatch):
    monkeypatch.setenv("TAILREPLAY_REDIS_SEAL_KEY_FILES", "/some/key")
    done = run("serve")
    assert done.returncode == 2
    assert "TAILREPLAY_REDIS_SEAL_KEY_FILES is no JSON" in done.stderr
    assert "/some/key" not in done.stderr


def _commands(group, *above):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *above, name)
        else:
            yield (*above, name)


@pytest.mark.parametrize(
    "command", [*_commands(typer.main.get_command(app))], ids=lambda words: " ".join(words)
)
def test_every_command_says_what_it_takes(command):
    said = CliRunner().invoke(app, [*command, "--help"])
    assert said.exit_code == 0, said.exception
    assert "Usage:" in said.stdout
    if command == ("demo",):
        assert "--json" in said.stdout


def test_serve_lists_every_setting_with_its_variable_and_default():
    listed = run("serve", "--settings").stdout
    assert all(name in listed for name in StoreConfig.model_fields)
    assert "TAILREPLAY_POOL_BYTES" in listed
    assert str(StoreConfig.model_fields["pool_bytes"].default) in listed


def test_an_unknown_setting_in_a_file_names_the_known_ones(tmp_path):
    file = tmp_path / "store.json"
    file.write_text('{"pool": 1}')
    done = run("serve", "--config", str(file))
    assert done.returncode == 2
    assert "store.json: pool is no setting, wanted one of" in done.stderr
    assert "pool_bytes" in done.stderr


@pytest.mark.parametrize("url", ["http://foo", "nonsense", "127.0.0.1:0x1"])
def test_a_wrong_address_is_refused_before_anything_is_asked(url):
    done = run("ping", "--url", url)
    assert done.returncode == 2
    assert f"--url: address is '{url}'" in done.stderr


def test_a_command_that_is_to_be_quiet_writes_no_file(server, tmp_path):
    file = tmp_path / "stats"
    done = run("stats", "-q", "--url", server.address, "--output", str(file))
    assert (done.returncode, file.exists()) == (2, False)
    assert "-q writes nothing, and --output names a file" in done.stderr
    absent = f"unix://{tmp_path}/none.sock"
    done = run("ping", "-q", "--url", absent)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert run("ping", "--url", absent).stderr  # which is not quiet because another was


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stats", "--watch", "x"), "'--watch': 'x', wanted a number"),
        (("stats", "--watch", "-1"), "'--watch': '-1', wanted at least 0"),
        (("size", "--tokens", "1.5"), "'--tokens': '1.5', wanted a whole number"),
        (("mode", "set", "a", "b"), "'wanted': 'b' is not one of 'exact', 'tail'"),
    ],
)
def test_an_option_that_is_wrong_is_said_with_its_value(words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_help_wraps_a_sentence_where_the_terminal_ends(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    for command, sentence in (
        ("explain", "from the nearest checkpoint that the store has where they part or before."),
        ("serve", "a flag goes over a variable, a variable over the file, the file over"),
    ):
        assert sentence in CliRunner().invoke(app, [command, "--help"]).stdout


def test_what_can_not_be_written_is_an_error_with_its_reason(server):
    done = run("stats", "--url", server.address, "--output", "/nowhere/stats")
    assert done.returncode == 1
    assert "/nowhere/stats can not be written" in done.stderr


def test_stats_keep_their_order_whatever_their_values(server):
    answer = json.loads(run("stats", "--url", server.address, "--format", "json").stdout)
    assert list(answer) == list(pb.StatsResponse.DESCRIPTOR.fields_by_name)


def test_watching_writes_again_and_again(server):
    command = [*COMMAND, "stats", "--watch", "0.01", "--url", server.address, "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.terminate()
    times = [datetime.fromisoformat(look["at"]) for look in looks]
    assert times == sorted(times)
    assert all("lookups" in look for look in looks)


def test_what_is_watched_comes_through_a_pipe_at_once(server):
    command = [*COMMAND, "stats", "--watch", "600", "--url", server.address, "--format", "json"]
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=buffered) as watching:
        late = threading.Timer(50, watching.kill)
        late.start()
        said = watching.stdout.readline()
        late.cancel()
        watching.terminate()
    assert "lookups" in json.loads(said)


def test_settings_are_json_types_in_order_and_nothing_is_spelt_one_way(server):
    settings = json.loads(run("describe", "--url", server.address, "--format", "json").stdout)
    settings = settings["settings"]
    assert list(settings) == sorted(settings)
    config = server.store.config
    plain = {name: getattr(config, name) for name in ("pool_bytes", "drain_s", "share_memory")}
    assert {name: settings[name] for name in plain} == plain
    assert (settings["redis_url"], settings["token_file"], settings["bulk_tiers"]) == (
        None,
        None,
        [],
    )
    assert settings["effective_pool_bytes"] == server.store.tiers.pool_bytes
    shown = run("describe", "--url", server.address).stdout
    lines = dict(line.split(None, 1) for line in shown.splitlines() if "  " in line)
    nothing = {lines[name].strip() for name in ("redis_url", "token_file", "redis_username")}
    assert (nothing, lines["share_memory"].strip()) == ({"-"}, "yes")


def test_the_whole_namespace_is_shown_however_narrow_the_terminal(server):
    assert bytes(range(32)).hex() in run("describe", "--url", server.address).stdout


def test_version_is_printed():
    assert run_alone("--version").stdout == version("tailreplay") + "\n"


OBJECT = {
    "kind": "hidden",
    "first_token": 131072,
    "end_token": 131328,
    "size_bytes": 1023 << 20,
    "tiers": ["cpu", "redis"],
    "provenance": "approximate",
    "idle_s": 86399,
    "pinned": True,
    "prefix_hash": "ab" * 32,
}
TENANT = {
    "tenant": "cd" * 16,
    "namespaces": 12,
    "cpu_bytes": 999 << 20,
    "cpu_limit_bytes": 999 << 20,
    "redis_bytes": 999 << 30,
    "redis_limit_bytes": 998 << 30,
    "evicted_bytes": 999 << 30,
    "refused_objects": 1234567,
}
PIN = {
    "pin_id": "ef" * 16,
    "namespace": "ab" * 32,
    "tokens": 131072,
    "pinned_tokens": 130816,
    "objects": 1234567,
    "bytes": 999 << 20,
    "left_out_bytes": 998 << 20,
    "expires_in_s": 86399,
}


@pytest.mark.parametrize(
    ("table", "answer", "shown"),
    [
        (
            cli_tables.objects,
            {"matched_tokens": 1, "tenant": "", "objects": [OBJECT]},
            ["131072 to 131328", "cpu+redis", "approximate", "86399", "idle s"],
        ),
        (cli_tables.tenants, {"tenants": [TENANT]}, ["cd" * 16, "998.0 GiB", "1234567", "refused"]),
        (cli_tables.pins, {"pins": [PIN]}, ["ef" * 16, "130816 of 131072", "998.0 MiB", "86399"]),
    ],
)
def test_a_table_fits_80_columns_and_nothing_of_it_is_cut_in_fewer(table, answer, shown):
    for width in (80, 40):
        console = Console(width=width, highlight=False)
        with console.capture() as capture:
            table(console, answer)
        said = capture.get()
        assert all(text in said for text in shown)
        assert "\N{HORIZONTAL ELLIPSIS}" not in said
        assert max(len(line) for line in said.splitlines()) <= 80
