"""A hit is a prefill: same states and same logits at every boundary, and nothing else passes."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, random_tokens, relative_l2, relative_max, tiny_qwen

from tailreplay.connector.hf_families import UnsupportedModel
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.triton_guard import guard_triton
from tailreplay.replay.groups import ReplayGroup
from tailreplay.replay.hidden_rows import HiddenRows
from tailreplay.replay.linear_state import LinearState

pytestmark = pytest.mark.model

STATE_BOUND = 1e-5
"""Relative L2 per layer, fp32: rounding carried through up to seven layers."""

LOGITS_BOUND = 1e-4
"""max|a - b| / max|b|, fp32."""

BF16_BOUND = 5e-2
"""For both, bf16: its steps are 2^-8, a matrix product of another shape may round the other way,
and later layers grow the difference; two prefills of the same tokens in other chunks differ by
as much (`test_two_ways_to_prefill_differ_as_much_in_bf16`)."""

FAR_OFF = 0.1
"""A wrong state shows as at least this much in the logits: 1000 times the fp32 bound."""

BOUNDARIES = [1, 2, 3, 4, 5, 63, 64, 65, 130, 257, 299]

SUFFIX = 20

PROJECTIONS = {
    "qwen3_5_text": ["in_proj_qkv", "in_proj_a", "in_proj_b"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba"],
    "olmo_hybrid": ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj"],
}
"""What the state of a linear layer is projected by."""


class Prefix:
    """A prompt that was prefilled once, with all that a cache would have kept of it."""

    def __init__(self, dtype=torch.float32, tokens=320, make=tiny_qwen):
        self.model = HybridModel(make(dtype))
        self.tokens = random_tokens(tokens)
        cache = self.model.new_cache()
        with self.model.watch.capture() as self.hidden:
            self.model.forward(self.tokens, cache)
        self.kv = {layer: cache.kv(layer) for layer in self.model.dims.fa_layers}

    def prefill(self, m, chunk=None):
        cache = self.model.new_cache()
        for start in range(0, m, chunk or m):
            self.model.forward(self.tokens[start : min(start + (chunk or m), m)], cache)
        return cache

    def states(self, m):
        return self.prefill(m).states()

    def with_kv(self, m):
        cache = self.model.new_cache()
        for layer, (keys, values) in self.kv.items():
            cache.install_kv(layer, keys[:, :m], values[:, :m])
        return cache

    def rows(self, group, start, end):
        source = self.tokens if group.source is None else self.hidden.rows(group.source)
        return source[start:end]

    def replay(self, cache, start, m, initial=None):
        for group in self.model.groups:
            self.model.replay_group(group, self.rows(group, start, m), cache, initial)

    def hit(self, m, k=None, checkpoint=None):
        """KV of m tokens; states from k rows, or from the states at token `checkpoint`."""
        cache = self.with_kv(m)
        if checkpoint is None:
            self.replay(cache, m - (k or m), m)
        elif checkpoint == m:
            cache.set_states(self.states(m))
        else:
            self.replay(cache, checkpoint, m, self.states(checkpoint))
        return cache

    def logits(self, cache, m, suffix=SUFFIX):
        return self.model.forward(self.tokens[m : m + suffix], cache)

    def check_states(self, got, wanted, bound):
        assert sorted(got) == sorted(wanted) == list(self.model.dims.linear_layers)
        for layer, state in wanted.items():
            assert relative_l2(got[layer].conv, state.conv) <= bound, f"conv of layer {layer}"
            error = relative_l2(got[layer].recurrent, state.recurrent)
            assert error <= bound, f"recurrent state of layer {layer}"

    def logits_error(self, cache, m, suffix=SUFFIX):
        """Of a cache, against a prefill split at m."""
        wanted = self.logits(self.prefill(m), m, suffix)
        return relative_max(self.logits(cache, m, suffix), wanted)


@pytest.fixture(scope="module")
def prefix():
    return Prefix()


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def any_prefix(request):
    """One of each family."""
    return Prefix(make=request.param)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def long_prefix(request):
    return Prefix(tokens=1020, make=request.param)


@pytest.fixture(scope="module")
def bf16_prefix():
    return Prefix(torch.bfloat16)


# Exactness


@pytest.mark.parametrize("m", BOUNDARIES)
def test_replay_of_all_rows_is_a_prefill(any_prefix, m):
    states = any_prefix.hit(m).states()
    any_prefix.check_states(states, any_prefix.states(m), STATE_BOUND)
    for suffix in (1, SUFFIX):
        assert any_prefix.logits_error(any_prefix.hit(m), m, suffix) <= LOGITS_BOUND


@pytest.mark.parametrize("m", BOUNDARIES)
def test_replay_of_all_rows_is_a_prefill_within_bf16(bf16_prefix, m):
    states = bf16_prefix.hit(m).states()
    bf16_prefix.check_states(states, bf16_prefix.states(m), BF16_BOUND)
    for suffix in (1, SUFFIX):
        assert bf16_prefix.logits_error(bf16_prefix.hit(m), m, suffix) <= BF16_BOUND


@pytest.mark.parametrize("chunk", [37, 100])
def test_two_ways_to_prefill_differ_as_much_in_bf16(bf16_prefix, chunk):
    error = bf16_prefix.logits_error(bf16_prefix.prefill(299, chunk), 299)
    assert LOGITS_BOUND < error <= BF16_BOUND


@pytest.mark.parametrize(
    ("checkpoint", "m"), [(512, 513), (512, 515), (512, 1000), (960, 1000), (1000, 1000)]
)
def test_replay_from_a_checkpoint_is_a_prefill(long_prefix, checkpoint, m):
    states = long_prefix.hit(m, checkpoint=checkpoint).states()
    long_prefix.check_states(states, long_prefix.states(m), STATE_BOUND)
    for suffix in (1, SUFFIX):
        cache = long_prefix.hit(m, checkpoint=checkpoint)
        assert long_prefix.logits_error(cache, m, suffix) <= LOGITS_BOUND


def test_a_hit_can_be_decoded_from_token_by_token(any_prefix):
    got, wanted = any_prefix.hit(130), any_prefix.prefill(130)
    for m in range(130, 136):
        error = relative_max(any_prefix.logits(got, m, 1), any_prefix.logits(wanted, m, 1))
        assert error <= LOGITS_BOUND


# What is not exact has to show


@pytest.mark.parametrize("m", [65, 299])
def test_states_of_another_boundary_are_far_off(any_prefix, m):
    cache = any_prefix.with_kv(m)
    cache.set_states(any_prefix.states(m - 1))
    assert any_prefix.logits_error(cache, m) > FAR_OFF
    with pytest.raises(AssertionError, match="of layer"):
        any_prefix.check_states(any_prefix.states(m - 1), any_prefix.states(m), 1000 * STATE_BOUND)


def test_zero_states_are_far_off(any_prefix):
    cache = any_prefix.with_kv(299)
    zeros = {
        layer: LinearState(torch.zeros_like(state.conv), torch.zeros_like(state.recurrent))
        for layer, state in any_prefix.states(299).items()
    }
    cache.set_states(zeros)
    assert any_prefix.logits_error(cache, 299) > FAR_OFF


def test_more_rows_replayed_are_less_error(prefix):
    errors = [prefix.logits_error(prefix.hit(299, k), 299) for k in (8, 50, 149, 299)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[2]
    assert errors[2] > LOGITS_BOUND


@pytest.mark.parametrize(("k", "right"), [(1, False), (2, False), (3, True), (4, True)])
def test_few_rows_leave_a_wrong_conv_state(prefix, k, right):
    """Even in the very first layer, whose inputs are exact."""
    got = prefix.hit(65, k).states()[0].conv
    assert (relative_l2(got, prefix.states(65)[0].conv) <= STATE_BOUND) == right


# Cache and hooks


def test_replay_needs_no_kv_and_no_order(any_prefix):
    model, cache = any_prefix.model, any_prefix.model.new_cache()
    for group in reversed(model.groups):
        model.replay_group(group, any_prefix.rows(group, 0, 130), cache)
    any_prefix.check_states(cache.states(), any_prefix.states(130), STATE_BOUND)


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


def test_kv_may_arrive_as_late_as_each_layer_reads_it(prefix):
    model, m = prefix.model, 130
    wanted = prefix.logits(prefix.prefill(m), m)
    buffers = {
        layer: tuple(torch.full_like(x[:, :m], torch.nan) for x in kv)
        for layer, kv in prefix.kv.items()
    }
    cache = model.new_cache()
    for layer, (keys, values) in buffers.items():
        cache.install_kv(layer, keys, values)
    prefix.replay(cache, 0, m)
    order = []

    def arrive(layer):
        order.append(layer)
        for buffer, x in zip(buffers[layer], prefix.kv[layer], strict=True):
            buffer.copy_(x[:, :m])

    with model.watch.waiting(arrive):
        got = prefix.logits(cache, m)
    assert order == list(model.dims.fa_layers)
    assert relative_max(got, wanted) <= LOGITS_BOUND
    prefix.logits(cache, m + SUFFIX)
    assert len(order) == len(model.dims.fa_layers), "called after its context"


def test_a_layer_that_is_not_waited_for_reads_what_is_there(prefix):
    """So that the test above can fail."""
    cache = prefix.prefill(130)
    keys, values = cache.kv(3)
    cache.install_kv(3, torch.full_like(keys, torch.nan), values)
    assert prefix.logits(cache, 130).isnan().all()


def test_an_error_while_waiting_ends_the_forward_and_unhooks(prefix):
    def fail(layer):
        raise TimeoutError(f"layer {layer}")

    with pytest.raises(TimeoutError, match="layer 3"), prefix.model.watch.waiting(fail):
        prefix.model.forward(prefix.tokens[:5], prefix.model.new_cache())
    prefix.model.forward(prefix.tokens[:5], prefix.model.new_cache())


def test_capture_joins_the_forwards_inside_it_and_no_others(prefix):
    model, cache = prefix.model, prefix.model.new_cache()
    with model.watch.capture() as hidden:
        model.forward(prefix.tokens[:40], cache)
        model.forward(prefix.tokens[40:41], cache)
    model.forward(prefix.tokens[41:50], cache)
    rows = hidden.rows(3)
    assert rows.shape == (41, model.dims.hidden_size)
    assert not rows.requires_grad
    assert relative_l2(rows, prefix.hidden.rows(3)[:41]) <= STATE_BOUND
    with pytest.raises(ValueError, match=r"no rows of source 7, wanted one of \[3\]"):
        hidden.rows(7)


@pytest.mark.parametrize("first", [0, 70])
def test_states_in_the_middle_of_a_forward_are_those_of_a_prefill_to_there(any_prefix, first):
    model, total = any_prefix.model, len(any_prefix.tokens)
    rows = [1, 2, 64, 200, total - first - 1]  # pieces of one token, whole pages, and neither
    cache = any_prefix.prefill(first) if first else model.new_cache()
    with model.watch.keeping(rows, cache) as kept:
        logits = model.forward(any_prefix.tokens[first:], cache)
    for row, states in zip(rows, kept, strict=True):
        any_prefix.check_states(states, any_prefix.states(first + row), STATE_BOUND)
    whole = any_prefix.prefill(first) if first else model.new_cache()
    wanted = model.forward(any_prefix.tokens[first:], whole)
    assert relative_max(logits, wanted) <= LOGITS_BOUND
    any_prefix.check_states(cache.states(), whole.states(), STATE_BOUND)


def test_a_forward_with_kept_states_projects_each_row_once(any_prefix):
    model, cache, rows = any_prefix.model, any_prefix.model.new_cache(), []
    attention = model._layers[model.dims.linear_layers[0]].linear_attn
    output = getattr(attention, "out_proj", None) or attention.o_proj
    with model.watch.keeping([64, 200], cache):
        watch = output.register_forward_hook(lambda _module, args, _out: rows.append(args[0]))
        try:
            model.forward(any_prefix.tokens, cache)
        finally:
            watch.remove()
    assert [len(part[0]) for part in rows] == [0, 0, len(any_prefix.tokens)]


def test_hiddens_that_came_at_once_are_not_copied(prefix):
    rows, hidden = torch.ones(3, prefix.model.dims.hidden_size), HiddenRows()
    hidden.add(3, rows)
    assert hidden.rows(3).data_ptr() == rows.data_ptr()
    hidden.add(3, 2 * rows)
    assert hidden.rows(3)[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_states_are_kept_of_one_threads_forward_alone_and_no_hook_stays(prefix):
    model, cache = prefix.model, prefix.model.new_cache()
    wanted = prefix.logits(prefix.prefill(10), 10)

    def other():
        return prefix.logits(prefix.prefill(10), 10)

    with ThreadPoolExecutor(1) as thread, model.watch.keeping([5], cache) as kept:
        assert torch.equal(thread.submit(other).result(), wanted)
        assert kept == [{}]
        model.forward(prefix.tokens, cache)
    prefix.check_states(kept[0], prefix.states(5), STATE_BOUND)
    assert torch.equal(other(), wanted)
    with model.watch.keeping([], cache) as none:
        prefix.logits(cache, 0)
    assert none == []


def test_forwards_of_other_threads_are_neither_captured_nor_made_to_wait(prefix):
    """Two engines, of two tenants even, may share a model."""
    model = prefix.model

    def other():
        cache = model.new_cache()
        return model.forward(prefix.tokens[100:130], cache)

    def fail(layer):
        raise TimeoutError(f"layer {layer}")

    with (
        ThreadPoolExecutor(1) as thread,
        model.watch.capture() as hidden,
        model.watch.waiting(fail),
    ):
        thread.submit(other).result()
        with pytest.raises(ValueError, match="no rows of source 3"):
            hidden.rows(3)
        with pytest.raises(TimeoutError):
            other()


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


def test_replay_does_not_change_the_states_it_starts_from(prefix):
    initial = prefix.states(65)
    prefix.replay(prefix.with_kv(70), 65, 70, initial)
    prefix.check_states(initial, prefix.states(65), 0.0)


# What it tells about the model


def test_it_names_the_layers_and_shapes(prefix):
    model = prefix.model
    assert model.groups == (ReplayGroup(None, (0, 1, 2)), ReplayGroup(3, (4, 5, 6)))
    dims = model.dims
    assert (dims.fa_layers, dims.hidden_sources) == ((3, 7), (3,))
    assert dims.linear_layers == (0, 1, 2, 4, 5, 6)
    assert (dims.key_heads, dims.value_heads, dims.key_dim, dims.value_dim) == (2, 4, 16, 24)
    assert (dims.kv_heads, dims.kv_head_dim, dims.hidden_size) == (2, 32, 64)
    assert (dims.conv_width, dims.dtype, dims.device.type) == (3, torch.float32, "cpu")


def test_states_are_k_first_and_fp32_in_bf16_too(bf16_prefix):
    for state in bf16_prefix.states(5).values():
        assert (tuple(state.conv.shape), state.conv.dtype) == ((160, 3), torch.bfloat16)
        assert (tuple(state.recurrent.shape), state.recurrent.dtype) == (
            (4, 16, 24),
            torch.float32,
        )


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


# Refusals


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


# Kernels


@pytest.fixture
def modules(monkeypatch):
    """`sys.modules` without fla, and with a triton; restored afterwards."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    del sys.modules["fla"]
    return sys.modules


def test_fla_cannot_be_imported_with_triton_but_no_gpu(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    guard_triton()
    with pytest.raises(ModuleNotFoundError):
        import fla  # noqa: F401


def test_fla_is_left_alone_with_a_gpu(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    guard_triton()
    assert "fla" not in modules


def test_fla_is_left_alone_without_triton(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("tailreplay.connector.hf_model._importable", lambda name: False)
    guard_triton()
    assert "fla" not in modules


# What a prefill tells of its memory


@pytest.mark.parametrize("k", [1, 8, 60])
def test_a_state_that_is_dropped_shrinks_at_least_as_the_trace_says(any_prefix, k):
    m, model = 250, any_prefix.model
    with model.watch.trace() as trace:
        any_prefix.prefill(m)
    shrunk = (trace.total()[m] - trace.total()[m - k]).exp()
    before, after = any_prefix.states(m - k), any_prefix.states(m)
    for group, places in zip(model.groups, model.group_places, strict=True):
        lost = {layer: replace(s, recurrent=s.recurrent * 0) for layer, s in before.items()}
        cache = model.new_cache()
        cache.set_states(lost)
        model.replay_group(group, any_prefix.rows(group, m - k, m), cache, lost)
        layer = group.linear_layers[0]  # later ones have wrong inputs besides
        got = cache.states()[layer].recurrent - after[layer].recurrent
        error, norm = (x.flatten(1).norm(dim=-1) for x in (got, before[layer].recurrent))
        bound = shrunk[places[0]] * norm
        assert (error <= 1.001 * bound + 1e-5).all()
        if k == 1:
            assert error.sum() > 0.7 * bound.sum()


def test_a_trace_goes_on_from_chunk_to_chunk_and_hears_no_other_thread(any_prefix):
    model = any_prefix.model
    with model.watch.trace() as whole:
        any_prefix.prefill(200)
    with model.watch.trace() as parts, ThreadPoolExecutor(1) as other:
        any_prefix.prefill(200, chunk=77)
        other.submit(any_prefix.prefill, 50).result()
    with model.watch.trace() as cut, model.watch.keeping([64, 130], cache := model.new_cache()):
        model.forward(any_prefix.tokens[:200], cache)
    assert whole.end == parts.end == cut.end == 200
    torch.testing.assert_close(cut.total(), whole.total(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts.total(), whole.total(), rtol=1e-4, atol=1e-4)


def test_norms_are_noted_of_states_that_are_there(prefix):
    model, cache = prefix.model, prefix.prefill(40)
    with model.watch.trace(40) as trace:
        cache.note_states(trace, 40)
        with pytest.raises(ValueError, match="no state"):
            model.new_cache().note_states(trace, 41)
    wanted = [state.recurrent.flatten(1).norm(dim=-1) for state in prefix.states(40).values()]
    torch.testing.assert_close(trace.log_norms(torch.tensor([40]))[0].exp(), torch.stack(wanted))
