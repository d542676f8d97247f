"""vllm#53595: a default that keeps few checkpoints was in force, and was never said."""

import json

from case_helpers import WAIT_S
from typer.testing import CliRunner

from tailreplay.connector.client import StoreClient
from tailreplay.connector.demo_processes import start_store
from tailreplay.store.cli import app
from tailreplay.store.config import StoreConfig


def test_one_line_at_start_and_describe_say_every_setting(tmp_path):
    address = f"unix://{tmp_path}/store.sock"
    process = start_store(address, None, 8 << 20, tmp_path)
    try:
        with StoreClient(address, match_timeout_s=WAIT_S):
            words = ["describe", "--url", address, "--format", "json"]
            told = json.loads(CliRunner().invoke(app, words).stdout)["settings"]
    finally:
        process.stop()
    (line,) = [
        line
        for file in tmp_path.glob("*.log")
        for line in file.read_text().splitlines()
        if "settings: " in line
    ]
    wanted = set(StoreConfig.model_fields) - {"redis_url"}  # which may hold a password
    assert all(f"{name}=" in line for name in wanted)
    assert wanted <= set(told)
    assert f"pool_bytes={8 << 20}" in line
    assert told["effective_pool_bytes"] == 8 << 20
