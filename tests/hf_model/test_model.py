"""What the view tells of a model, and what it refuses."""

import types

import pytest
import torch
from tiny_models import FAMILIES, tiny_qwen

from tailreplay.connector.hf_families import UnsupportedModel
from tailreplay.connector.hf_model import HybridModel
from tailreplay.replay.groups import ReplayGroup

pytestmark = pytest.mark.model

PROJECTIONS = {
    "qwen3_5_text": ["in_proj_qkv", "in_proj_a", "in_proj_b"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba"],
    "olmo_hybrid": ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj"],
}
"""What the state of a linear layer is projected by."""


def test_it_names_the_layers_and_shapes(prefix):
    model = prefix.model
    assert model.groups == (ReplayGroup(None, (0, 1, 2)), ReplayGroup(3, (4, 5, 6)))
    dims = model.dims
    assert (dims.fa_layers, dims.hidden_sources) == ((3, 7), (3,))
    assert dims.linear_layers == (0, 1, 2, 4, 5, 6)
    assert (dims.key_heads, dims.value_heads, dims.key_dim, dims.value_dim) == (2, 4, 16, 24)
    assert (dims.kv_heads, dims.kv_head_dim, dims.hidden_size) == (2, 32, 64)
    assert (dims.conv_width, dims.dtype, dims.device.type) == (3, torch.float32, "cpu")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_the_name_the_model_has_for_it(prefix, name):
    """Transformers 5.19 and 5.24 differ; a wrong name is swallowed."""
    model = tiny_qwen()
    inner = model.forward
    own = prefix.model._model_cache_name

    def renamed(cache, **inputs):
        return inner(**{own: cache}, **inputs)

    def kept(past_key_values, **inputs):
        return inner(**{own: past_key_values}, **inputs)

    model.forward = renamed if name == "cache" else kept
    view = HybridModel(model)
    cache = view.new_cache()
    view.forward(prefix.tokens[:5], cache)
    assert cache.tokens == 5


def test_another_family_is_refused_by_name():
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama"))
    with pytest.raises(UnsupportedModel, match="model_type is 'llama', wanted one of"):
        HybridModel(model)


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in PROJECTIONS[family]],
)
def test_a_projection_that_cannot_be_cut_is_refused(family, name):
    model = FAMILIES[family]()
    attention = model.model.layers[0].linear_attn
    setattr(attention, name, torch.nn.Sequential(getattr(attention, name)))
    with pytest.raises(UnsupportedModel, match=f"{name} is a Sequential, wanted"):
        HybridModel(model)


def test_another_activation_is_refused():
    model = tiny_qwen()
    model.model.layers[4].linear_attn.activation = "gelu"
    with pytest.raises(UnsupportedModel, match="activation is 'gelu', wanted 'silu'"):
        HybridModel(model)


@pytest.mark.parametrize(
    "tokens",
    [torch.zeros(0, dtype=torch.int64), torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64)],
)
def test_wrong_tokens_are_refused(prefix, tokens):
    model = prefix.model
    with pytest.raises(ValueError, match="tokens: got"):
        model.forward(tokens, model.new_cache())
    with pytest.raises(ValueError, match="tokens: got"):
        model.replay_group(model.groups[0], tokens, model.new_cache())


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(0, 64), torch.zeros(5, 63), torch.zeros(64), torch.zeros(5, 64).bfloat16()],
)
def test_wrong_rows_are_refused(prefix, rows):
    model = prefix.model
    with pytest.raises(ValueError, match="rows of source 3: got"):
        model.replay_group(model.groups[1], rows, model.new_cache())


def test_replay_refuses_a_start_that_is_not_clear(prefix):
    model, group = prefix.model, prefix.model.groups[1]
    rows, states = prefix.rows(group, 65, 70), prefix.states(65)
    with pytest.raises(ValueError, match="layer 4 has a state, wanted none"):
        model.replay_group(group, rows, prefix.prefill(65))
    del states[5]
    cache = model.new_cache()
    with pytest.raises(ValueError, match="wanted 5 as well"):
        model.replay_group(group, rows, cache, states)
    assert not cache.has_state(4)
    with pytest.raises(ValueError, match="is not of this model"):
        model.replay_group(ReplayGroup(3, (4, 5)), rows, cache)
