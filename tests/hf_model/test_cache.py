"""Keys, values and states go into a cache and come out of it as they are, or not at all."""

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.model


def test_installed_kv_is_adopted_without_a_copy_and_never_written(prefix):
    model, cache = prefix.model, prefix.model.new_cache()
    keys, values = (x[:, :65].clone() for x in prefix.kv[3])
    before = keys.clone(), values.clone()
    cache.install_kv(3, keys, values)
    assert [x.data_ptr() for x in cache.kv(3)] == [keys.data_ptr(), values.data_ptr()]
    assert cache.tokens == 65
    cache.install_kv(7, *(x[:, :65] for x in prefix.kv[7]))
    cache.set_states(prefix.states(65))
    model.forward(prefix.tokens[65:70], cache)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    assert cache.kv(3)[0].shape[1] == 70


def test_states_are_copies_both_ways(prefix):
    model = prefix.model
    states = prefix.states(65)
    kept = {layer: (x.conv.clone(), x.recurrent.clone()) for layer, x in states.items()}
    cache = prefix.with_kv(65)
    cache.set_states(states)
    read = cache.states()
    model.forward(prefix.tokens[65:66], cache)
    for layer, (conv, recurrent) in kept.items():
        for state in (states[layer], read[layer]):
            assert torch.equal(state.conv, conv)
            assert torch.equal(state.recurrent, recurrent)


def test_states_can_replace_states(prefix):
    cache = prefix.prefill(130)
    cache.set_states(prefix.states(65))
    prefix.check_states(cache.states(), prefix.states(65), 0.0)


def test_states_are_k_first_and_fp32_in_bf16_too(bf16_prefix):
    for state in bf16_prefix.states(5).values():
        assert (tuple(state.conv.shape), state.conv.dtype) == ((160, 3), torch.bfloat16)
        assert (tuple(state.recurrent.shape), state.recurrent.dtype) == (
            (4, 16, 24),
            torch.float32,
        )


def test_kv_without_states_is_refused(prefix):
    with pytest.raises(ValueError, match=r"holds KV of 65 tokens; wanted a state in .*\[0, 1, 2"):
        prefix.logits(prefix.with_kv(65), 65)


def test_states_without_kv_are_refused(prefix):
    cache = prefix.model.new_cache()
    prefix.replay(cache, 0, 65)
    with pytest.raises(ValueError, match="holds KV of 0 tokens; wanted none in linear layers"):
        prefix.logits(cache, 65)


def test_kv_of_unequal_lengths_is_refused(prefix):
    cache = prefix.hit(65)
    cache.install_kv(7, *(x[:, :64] for x in prefix.kv[7]))
    with pytest.raises(ValueError, match=r"FA layers hold \{3: 65, 7: 64\} tokens"):
        prefix.logits(cache, 65)


@pytest.mark.parametrize(
    ("keys", "values", "name"),
    [
        ((2, 0, 32), (2, 0, 32), "keys"),
        ((1, 2, 5, 32), (2, 5, 32), "keys"),
        ((4, 5, 32), (4, 5, 32), "keys"),
        ((2, 5, 32), (2, 6, 32), "values"),
    ],
)
def test_wrong_kv_is_refused(prefix, keys, values, name):
    model = prefix.model
    with pytest.raises(ValueError, match=f"{name} of layer 3: got"):
        model.new_cache().install_kv(3, torch.zeros(keys), torch.zeros(values))


def test_kv_of_another_dtype_is_refused(prefix):
    keys, values = (x.bfloat16() for x in prefix.kv[3])
    with pytest.raises(ValueError, match=r"keys of layer 3: got .* torch.bfloat16 on cpu, wanted"):
        prefix.model.new_cache().install_kv(3, keys, values)


def test_a_wrong_state_is_refused_before_any_is_written(prefix):
    cache, states = prefix.model.new_cache(), prefix.states(5)
    v_first = replace(states[6], recurrent=states[6].recurrent.mT.contiguous())
    with pytest.raises(ValueError, match=r"recurrent state of layer 6: got \[4, 24, 16\]"):
        cache.set_states({**states, 6: v_first})
    four_columns = replace(states[6], conv=torch.zeros(160, 4))
    with pytest.raises(ValueError, match=r"conv state of layer 6: got \[160, 4\]"):
        cache.set_states({**states, 6: four_columns})
    assert not cache.has_state(0)


def test_layers_of_the_wrong_kind_are_refused(prefix):
    cache = prefix.prefill(5)
    with pytest.raises(ValueError, match="layer 4 is no FA layer"):
        cache.kv(4)
    with pytest.raises(ValueError, match="layer 3 is no linear layer"):
        cache.set_states({3: prefix.states(5)[4]})


def test_what_is_empty_cannot_be_read(prefix):
    model = prefix.model
    with pytest.raises(ValueError, match="linear layer 0 has no state"):
        model.new_cache().states()
    with pytest.raises(ValueError, match="FA layer 3 holds no tokens"):
        model.new_cache().kv(3)
