"""vllm PR 48402: a block of 8320 tokens, more than a prompt may have, hit 0 of 10608 in silence."""

import logging

import pytest
from case_helpers import ask, assert_reused, assert_right, fork, policy, prompt, replica
from tiny_models import tiny_qwen

pytestmark = pytest.mark.model


def test_a_prefill_chunk_never_limits_what_is_reused(store, caplog):
    model = tiny_qwen()
    model.config.max_position_embeddings = 4096
    caplog.set_level(logging.INFO, "tailreplay.connector.hf")
    whole = policy(prefill_chunk_tokens=8320)
    with replica(store.address, model, policy=whole, tenant="chunk") as engine:
        said = [record.getMessage() for record in caplog.records]
        assert any("any token" in line and "8320" in line for line in said), said
        first = prompt(700)
        tokens = fork(first, 333)
        ask(engine, first)
        out = ask(engine, tokens)
    assert_reused(out.report, 333)
    assert_right(out, tokens)
