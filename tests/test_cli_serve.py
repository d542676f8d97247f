"""`serve`: every setting is a flag, and what of several places counts."""

import json
import re

import pytest
from typer.testing import CliRunner

from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.cli_serve import panel_of
from tailreplay.store.config import StoreConfig


@pytest.fixture(scope="module")
def said():
    """`serve --help` without its frames, and with single blanks."""
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    shown = CliRunner(env=wide).invoke(app, ["serve", "--help"]).stdout
    return re.sub(r" +", " ", shown.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", ""))


@pytest.mark.parametrize("name", StoreConfig.model_fields)
def test_every_setting_is_a_flag_with_its_sentence(said, name):
    field = StoreConfig.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    (line,) = [line for line in said.splitlines() if line.lstrip().startswith(f"{flag} ")]
    assert field.description in line
    default = field.get_default(call_default_factory=True)
    assert ("[default: " in line) == (default not in (None, "", ()))


def test_settings_stand_under_headings(said):
    for name in StoreConfig.model_fields:
        heading, flag = said.index(f"─ {panel_of(name)} ─"), f"--{name.replace('_', '-')} "
        assert "─╯" not in said[heading : said.index(flag, heading)]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--max-workers", "2"], "--max-workers is '2', wanted at least 4"),
        (["--drain-s", "soon"], "--drain-s is 'soon', wanted a number"),
        (["--pool-bytes", "much"], "--pool-bytes is 'much', wanted a size such as 512MiB"),
        (["--pool-bytes", "1KiB"], "--pool-bytes is '1KiB', wanted at least 4194304"),
        (["--share-memory", "perhaps"], "--share-memory is 'perhaps', wanted yes or no"),
        (["--admit", "third"], "--admit is 'third', wanted 'first' or 'second'"),
        (["--redis-seal-key-files", "/none"], "/none can not be read"),
        (["--bulk-tiers", "{"], "--bulk-tiers is no JSON"),
        (["--bulk-tiers", "[]"], "--bulk-tiers holds a JSON list, wanted an object"),
        (["--bulk-tiers", '{"type": "fs"}'], "bulk_tiers are set without redis_url"),
        (["--tls-cert", "a.pem"], "tls_cert and tls_key go together"),
    ],
)
def test_a_wrong_flag_is_refused_as_any_setting_is(words, wanted):
    assert wanted in run(*words)


def listed(*words: str) -> dict[str, str]:
    """Values that `serve --settings` shows, of settings that have another than the default."""
    done = CliRunner().invoke(app, ["serve", "--settings", *words])
    assert done.exit_code == 0, done.output
    items = [
        dict(line.split(None, 1) for line in item.splitlines()) for item in _items(done.stdout)
    ]
    assert [item["setting"] for item in items] == [*StoreConfig.model_fields]
    return {item["setting"]: item["value"] for item in items if "value" in item}


def _items(shown: str) -> list[str]:
    lines = [line for line in shown.split("\n\n") if line.strip()]
    return [re.sub(r"(?m)^(default|meaning) *$", r"\1 none", line) for line in lines]


def test_flags_go_over_variables_over_the_file_over_defaults(tmp_path, monkeypatch):
    monkeypatch.delenv("TAILREPLAY_REDIS_PATIENCE_S")  # which all tests have
    assert listed() == {}
    file = tmp_path / "store.json"
    file.write_text(
        json.dumps({"drain_s": 5, "max_workers": 11, "max_lanes": 3, "index_bytes": "256MiB"})
    )
    monkeypatch.setenv("TAILREPLAY_STAGING_BYTES", "2GiB")
    monkeypatch.setenv("TAILREPLAY_DRAIN_S", "7")
    monkeypatch.setenv("TAILREPLAY_MAX_WORKERS", "9")
    flags = ["--drain-s", "1.5", "--pool-bytes", "8MiB", "--share-memory", "no"]
    flags += ["--share-memory-uids", "7", "--share-memory-uids", "8"]
    flags += ["--redis-url", "redis://user:hush@127.0.0.1:1"]
    flags += ["--bulk-tiers", '{"type": "fs", "base_path": "/none"}']
    assert listed("--config", str(file), *flags) == {
        "drain_s": "1.5 (flag)",
        "max_workers": "9 (TAILREPLAY_MAX_WORKERS)",
        "max_lanes": "3 (file)",
        "index_bytes": f"{256 << 20} (file)",
        "staging_bytes": f"{2 << 30} (TAILREPLAY_STAGING_BYTES)",
        "pool_bytes": f"{8 << 20} (flag)",
        "share_memory": "false (flag)",
        "share_memory_uids": "[7, 8] (flag)",
        "redis_url": "redis://127.0.0.1:1 (flag)",
        "bulk_tiers": '["fs"] (flag)',
    }


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("much", "TAILREPLAY_POOL_BYTES is 'much', wanted a size such as 512MiB"),
        ("9EiB", "TAILREPLAY_POOL_BYTES is '9EiB', wanted a size such as 512MiB"),
        ("1KiB", "TAILREPLAY_POOL_BYTES is '1KiB', wanted at least 4194304"),
    ],
)
def test_a_wrong_size_in_a_variable_is_refused_as_a_flags_is(value, wanted, monkeypatch):
    monkeypatch.setenv("TAILREPLAY_POOL_BYTES", value)
    assert wanted in run()


def test_every_setting_in_bytes_takes_a_size():
    names = [name for name in StoreConfig.model_fields if name.endswith("_bytes")]
    config = StoreConfig(**dict.fromkeys(names, "32MiB"))
    assert {getattr(config, name) for name in names} == {32 << 20}


def test_a_wrong_setting_in_a_file_is_named_with_the_file(tmp_path):
    file = tmp_path / "store.json"
    file.write_text(
        '{"redis_url": "http://user:hush@x", "drain_s": -1, "share_memory_uids": ["a"]}'
    )
    said = run("--config", str(file))
    assert f"{file}: drain_s is -1, wanted at least 0" in said
    assert f"{file}: share_memory_uids is 'a', wanted a whole number" in said
    assert f"{file}: redis_url: Redis URL with scheme 'http'" in said
    assert "hush" not in said


def test_a_variable_that_is_mistyped_is_said_with_the_one_that_is_near(monkeypatch):
    monkeypatch.setenv("TAILREPLAY_POOL_BTYES", "1GiB")
    monkeypatch.setenv("TAILREPLAY_CLIENT_TOKEN_FILE", "")
    said = CliRunner().invoke(app, ["serve", "--settings"]).stderr
    assert (
        "TAILREPLAY_POOL_BTYES is no setting of a store, ignored: wanted TAILREPLAY_POOL_BYTES?"
        in said
    )
    assert "CLIENT_TOKEN_FILE" not in said


def test_an_address_that_is_taken_is_said_before_a_pool_is_reserved(tmp_path):
    with serve_in_thread(
        listen=f"unix://{tmp_path}/store.sock", http_listen="127.0.0.1:0"
    ) as taken:
        free = f"unix://{tmp_path}/free.sock"
        for words in (
            ("--listen", taken.address),
            ("--listen", free, "--http-listen", taken.http_address),
        ):
            done = CliRunner().invoke(app, ["serve", *words])
            assert done.exit_code == 1
            assert f"can not listen at {words[-1]}: " in done.stderr
        assert CliRunner().invoke(app, ["ping", "--url", taken.address]).exit_code == 0
