"""Engines share nothing where they differ in anything, and refuse what they do not know."""

import pytest
import torch
from case_helpers import (
    WAIT_S,
    ask,
    assert_reused,
    replica,
)
from hf_prompts import SHORT
from tiny_models import tiny_qwen

from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf import UnsupportedModel
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.namespace import NamespaceFields
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model


def test_a_family_that_is_not_known_is_named():
    model = tiny_qwen()
    model.config.model_type = "mamba9"
    with pytest.raises(UnsupportedModel, match="mamba9"):
        replica("unix:///nowhere.sock", model)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "0 tokens"),
        ([1, 256, 2], "256"),
        ([1, -1, 2], "-1"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([1.5], "float64"),
        ([0] * 65536, "65536"),
    ],
    ids=["empty", "unknown", "negative", "nested", "fractions", "too long"],
)
def test_a_bad_prompt_is_refused_with_the_value_it_had(engine, tokens, said):
    with pytest.raises(InvalidRequest, match=said):
        engine.generate(tokens, 1)


def test_nothing_to_generate_is_refused(engine):
    with pytest.raises(InvalidRequest, match="max_new_tokens is 0"):
        engine.generate(SHORT, 0)


def test_another_tenant_sees_nothing(server):
    with (
        replica(server.address, tenant="a") as a,
        replica(server.address, tenant="b") as b,
        replica(server.address, tenant="a") as again,
    ):
        ask(a, SHORT)
        assert ask(b, SHORT).report["matched_tokens"] == 0
        assert_reused(ask(again, SHORT).report, len(SHORT) - 1)


def other_config():
    model = tiny_qwen()
    model.config.rope_parameters["rope_theta"] *= 2
    return {"model": model, "weights_id": "w"}


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"weights_id": "v"},
        lambda: {"weights_id": "w", "tokenizer_id": "t"},
        lambda: {"weights_id": "w", "tenant": "another"},
        lambda: {"model": tiny_qwen(torch.bfloat16), "weights_id": "w"},
        other_config,
        lambda: {"model": tiny_qwen(seed=1)},
    ],
    ids=["weights", "tokenizer", "tenant", "dtype", "config", "digest of weights"],
)
def test_an_engine_that_differs_in_one_thing_shares_nothing(server, tenant, changed):
    settings = {"tenant": tenant} | changed()
    same = {"tenant": tenant} | ({"weights_id": "w"} if "weights_id" in settings else {})
    with (
        replica(server.address, **same) as engine,
        replica(server.address, **settings) as other,
    ):
        ask(engine, SHORT)
        assert other.namespace != engine.namespace
        out = ask(other, SHORT)
        assert (out.report["mode"], out.report["matched_tokens"]) == ("miss", 0)


def test_a_namespace_that_differs_in_any_one_field_matches_nothing(server, tenant):
    base = NamespaceFields(model={"layers": 8}, weights_id="w", tenant_salt=tenant)
    others = {
        "model": {"layers": 9},
        "weights_id": "v",
        "tokenizer_id": "t",
        "adapter_digest": "",
        "tenant_salt": "s",
        "kv_dtype": "bfloat16",
        "quantisation": "int8",
        "format_version": 1,
    }
    assert set(others) == set(NamespaceFields.model_fields)
    tokens = extended_tokens(SHORT)
    with replica(server.address, tenant=tenant) as engine, StoreClient(server.address) as client:
        engine.namespace = base.digest()
        ask(engine, SHORT)
        assert client.match(base.digest(), tokens, timeout_s=WAIT_S).matched_tokens == len(SHORT)
        for field, value in others.items():
            namespace = base.model_copy(update={field: value}).digest()
            assert client.match(namespace, tokens, timeout_s=WAIT_S).matched_tokens == 0, field
