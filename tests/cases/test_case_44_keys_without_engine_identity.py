"""rtx6kpro#55: keys on disk named no engine, and a bad image's bytes poisoned later tests."""

import json
from contextlib import closing

import pytest
from case_helpers import prompt
from store_objects import Client, Prefix
from typer.testing import CliRunner
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.namespace import NamespaceFields

IDS = prompt(600)
ENGINE = NamespaceFields(
    model={"layers": 4}, weights_id="rev-a", tokenizer_id="tok", kv_dtype="bf16"
)
OTHERS = {
    "model revision": {"weights_id": "rev-b"},
    "layout": {"format_version": ENGINE.format_version + 1},
    "dtype": {"kv_dtype": "fp8"},
    "quantisation": {"quantisation": "awq"},
    "kernel tag": {"model": {"layers": 4, "kernel": "new"}},
    "tokenizer": {"tokenizer_id": "tok2"},
    "adapter": {"adapter_digest": "00"},
    "tenant": {"tenant_salt": "other"},
}


def of(**changed) -> Prefix:
    return Prefix(ENGINE.model_copy(update=changed).digest(), IDS)


@pytest.mark.redis
def test_an_engine_that_differs_in_anything_hits_nothing_and_its_namespace_can_be_purged(
    redis_server,
):
    with (
        serve_in_thread(redis_url=redis_server.url) as server,
        closing(Client(server.address)) as client,
    ):
        poisoned, fresh = of(), of(weights_id="rev-b")
        client.put(poisoned)
        until(lambda: not client.stats().redis_pending_bytes)
        for what, changed in OTHERS.items():
            assert client.match(of(**changed)).matched_tokens == 0, what
        assert client.match(of()).matched_tokens == 600
        client.put(fresh)
        until(lambda: not client.stats().redis_pending_bytes)
        words = ["purge", "--namespace", poisoned.namespace.hex(), "--url", server.address]
        done = CliRunner().invoke(app, [*words, "--format", "json"])
        tiers = {row["tier"] for row in json.loads(done.stdout)["removed"]}
        assert tiers == {"cpu", "redis"}
        assert client.match(poisoned).matched_tokens == 0
        assert client.match(fresh).matched_tokens == 600
    with (
        serve_in_thread(redis_url=redis_server.url) as server,
        closing(Client(server.address)) as client,
    ):
        assert client.match(poisoned).matched_tokens == 0
        assert client.match(fresh).matched_tokens == 600
