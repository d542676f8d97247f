"""Payloads carry every tensor bit for bit, and a head shard of one is a contiguous run of units."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, random_tokens, tiny_qwen

from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.payload import PayloadCodec
from tailreplay.replay.linear_state import LinearState
from tailreplay.store.geometry import Dtype, StateLayout
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dims(request):
    """Two value heads per key head, K = 16 and V = 24."""
    return HybridModel(tiny_qwen(request.param)).dims


@pytest.fixture(scope="module")
def codec(dims):
    return PayloadCodec(dims)


def noise(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_kv(dims, tokens):
    shape = (dims.kv_heads, tokens, dims.kv_head_dim)
    return [
        (
            noise(*shape, dtype=dims.dtype, seed=2 * i),
            noise(*shape, dtype=dims.dtype, seed=99 + i),
        )
        for i in range(len(dims.fa_layers))
    ]


def some_states(dims):
    return {
        layer: LinearState(
            noise(*dims.conv_shape, dtype=dims.dtype, seed=layer),
            noise(*dims.recurrent_shape, dtype=torch.float32, seed=100 + layer),
        )
        for layer in dims.linear_layers
    }


def as_units(payload, geometry, rows):
    return np.frombuffer(payload, "u1").reshape(geometry.units, rows, geometry.row_bytes).copy()


def test_geometry_says_what_the_model_is(dims, codec):
    dtype = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}[dims.dtype]
    kv, hidden, state = (codec.geometry[kind] for kind in Kind)
    assert (kv.dtype, kv.shape) == (dtype, (2, 2, 32, 0, 0, 0))
    assert (hidden.dtype, hidden.shape) == (dtype, (1, 64, 0, 0, 0, 0))
    assert (state.dtype, state.shape) == (dtype, (6, 2, 2, 16, 24, 3))
    assert (state.state_dtype, state.state_layout) == (Dtype.FLOAT32, StateLayout.K_FIRST)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 100), (37, 100), (99, 100)])
def test_keys_and_values_come_back_layer_by_layer(dims, codec, first, end):
    layers = some_kv(dims, 100)
    payload = codec.pack_kv(layers, first, end)
    units = as_units(payload, codec.geometry[Kind.KV], end - first)
    for i, (keys, values) in enumerate(layers):
        got = codec.unpack_kv(units[i * dims.kv_heads : (i + 1) * dims.kv_heads])
        assert torch.equal(got[0], keys[:, first:end])
        assert torch.equal(got[1], values[:, first:end])


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 64), (13, 50)])
def test_hiddens_come_back_source_by_source(dims, codec, first, end):
    sources = [noise(64, dims.hidden_size, dtype=dims.dtype) for _ in dims.hidden_sources]
    payload = codec.pack_hidden(sources, first, end)
    units = as_units(payload, codec.geometry[Kind.HIDDEN], end - first)
    for i, rows in enumerate(sources):
        assert torch.equal(codec.unpack_hidden(units[i : i + 1]), rows[first:end])


@pytest.mark.parametrize(("first", "end"), [(0, 64), (13, 50)])
def test_hiddens_in_host_memory_are_stored_from_where_they_lie(dims, codec, first, end):
    sources = [noise(64, dims.hidden_size, dtype=dims.dtype) for _ in range(2)]
    parts = codec.hidden_parts(sources, first, end)
    assert b"".join(parts) == bytes(codec.pack_hidden(sources, first, end))
    for rows, part in zip(sources, parts, strict=True):
        assert np.frombuffer(part, np.uint8).ctypes.data == rows[first:end].data_ptr()


def test_states_come_back(dims, codec):
    states = some_states(dims)
    units = as_units(codec.pack_checkpoint(states), codec.geometry[Kind.CHECKPOINT], 1)
    got = codec.unpack_checkpoint(units)
    assert sorted(got) == sorted(states)
    for layer, state in states.items():
        assert torch.equal(got[layer].conv, state.conv)
        assert torch.equal(got[layer].recurrent, state.recurrent)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_states_of_every_family_come_back_as_they_were(make):
    """As the model itself left them, and as it reads them again."""
    model = HybridModel(make())
    codec, cache, restored = PayloadCodec(model.dims), model.new_cache(), model.new_cache()
    model.forward(random_tokens(9), cache)
    units = as_units(codec.pack_checkpoint(cache.states()), codec.geometry[Kind.CHECKPOINT], 1)
    restored.set_states(codec.unpack_checkpoint(units))
    for layer in model.dims.linear_layers:
        kept, got = cache.inner.layers[layer], restored.inner.layers[layer]
        assert torch.equal(got.conv_states[0][..., 1:], kept.conv_states[0][..., 1:])
        assert torch.equal(got.recurrent_states[0], kept.recurrent_states[0])


def test_a_buffer_that_is_filled_later_shows_in_keys_and_values(dims, codec):
    geometry = codec.geometry[Kind.KV]
    buffer = np.full((dims.kv_heads, 5, geometry.row_bytes), 0xFF, "u1")
    keys, values = codec.unpack_kv(buffer)
    assert keys.isnan().all()
    layers = some_kv(dims, 5)
    buffer[:] = as_units(codec.pack_kv(layers, 0, 5), geometry, 5)[: dims.kv_heads]
    assert torch.equal(keys, layers[0][0])
    assert torch.equal(values, layers[0][1])


def test_a_kv_head_shard_is_the_payload_of_an_engine_that_has_that_head_alone(dims, codec):
    layers = some_kv(dims, 70)
    units = as_units(codec.pack_kv(layers, 0, 70), codec.geometry[Kind.KV], 70)
    for layer, (keys, values) in enumerate(layers):
        for head in range(dims.kv_heads):
            alone = codec.pack_kv([(keys[head : head + 1], values[head : head + 1])], 0, 70)
            assert units[layer * dims.kv_heads + head].tobytes() == bytes(alone)


def test_a_checkpoint_shard_is_the_payload_of_an_engine_that_has_that_key_head_alone(dims, codec):
    states = some_states(dims)
    units = as_units(codec.pack_checkpoint(states), codec.geometry[Kind.CHECKPOINT], 1)
    values = dims.value_heads // dims.key_heads
    for head in range(dims.key_heads):
        one = PayloadCodec(_with_key_heads(dims, 1))
        shard = {layer: _shard(dims, s, head, values) for layer, s in states.items()}
        alone = as_units(one.pack_checkpoint(shard), one.geometry[Kind.CHECKPOINT], 1)
        assert units[head :: dims.key_heads].tobytes() == alone.tobytes()


def test_a_dtype_that_can_not_be_stored_is_named():
    with pytest.raises(ValueError, match="float64"):
        PayloadCodec(HybridModel(tiny_qwen(torch.float64)).dims)


def _with_key_heads(dims, heads):
    """The shape of one tensor-parallel rank of the model."""
    values = heads * dims.value_heads // dims.key_heads
    return replace(dims, key_heads=heads, value_heads=values)


def _shard(dims, state, head, values):
    """The part of a state that belongs to one key head: its q, k and v channels and its states."""
    keys = dims.key_heads * dims.key_dim
    q = state.conv[head * dims.key_dim :][: dims.key_dim]
    k = state.conv[keys + head * dims.key_dim :][: dims.key_dim]
    width = values * dims.value_dim
    v = state.conv[2 * keys + head * width :][:width]
    return LinearState(torch.cat((q, k, v)), state.recurrent[head * values :][:values])
