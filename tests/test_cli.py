"""The command line: answers, formats, exit codes, and what it must not load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from store_objects import Client, Prefix

from tailreplay.store import serve_in_thread


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tailreplay.store.cli", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
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
    assert run("ping", "--url", server.address, "-q").returncode == 0
    absent = run("ping", "--url", f"unix://{tmp_path}/none.sock")
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
    ("text", "said"), [("nonsense", "no JSON"), ('{"a": 1}', "array"), ("[1, -2]", "-2")]
)
def test_explain_refuses_what_is_no_prompt(server, text, said):
    done = run("explain", "-", "--url", server.address, "--namespace", "00" * 32, stdin=text)
    assert done.returncode == 1
    assert said in done.stderr


def test_explain_says_that_there_is_no_such_prompt(tmp_path):
    done = run("explain", str(tmp_path / "none.json"), str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "none.json can not be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "said"), [("[1]", "wanted an object"), ("{", "no JSON")])
def test_serve_refuses_a_file_that_holds_no_settings(tmp_path, text, said):
    file = tmp_path / "settings.json"
    file.write_text(text)
    done = run("serve", "--config", str(file))
    assert done.returncode == 1
    assert f"{file}" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_refuses_a_wrong_setting_by_name():
    done = run("serve", "--pool-bytes", "12")
    assert done.returncode == 1
    assert "pool_bytes" in done.stderr
    assert "Traceback" not in done.stderr
