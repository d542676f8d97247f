"""Hooks see this thread's forwards inside their context, and no others."""

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FunctionType, MethodType

import pytest
import torch
from hf_prefix import LOGITS_BOUND, STATE_BOUND, SUFFIX, Prefix
from tiny_models import relative_l2, relative_max

from tailreplay.connector.hf_cuts import RULE
from tailreplay.connector.hf_run import PromptRun
from tailreplay.connector.report import Report
from tailreplay.replay.hidden_rows import HiddenRows

pytestmark = pytest.mark.model


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
    with model.watch.keeping(rows) as kept:
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
    with model.watch.keeping([64, 200]):
        watch = output.register_forward_hook(lambda _module, args, _out: rows.append(args[0]))
        try:
            model.forward(any_prefix.tokens, cache)
        finally:
            watch.remove()
    assert [len(part[0]) for part in rows] == [len(any_prefix.tokens)]


def test_states_kept_at_pages_ends_change_no_bit_of_what_a_forward_gives(any_prefix):
    """There the chunks of the rule end anyway."""
    model, whole, stopped = any_prefix.model, *(any_prefix.model.new_cache() for _ in range(2))
    wanted = model.forward(any_prefix.tokens, whole)
    with model.watch.keeping([64, 256]) as kept:
        got = model.forward(any_prefix.tokens, stopped)
    assert torch.equal(got, wanted)
    any_prefix.check_states(stopped.states(), whole.states(), 0)
    any_prefix.check_states(kept[1], any_prefix.states(256), STATE_BOUND)


def test_a_model_that_is_not_watched_runs_as_ever_beside_one_that_is(prefix):
    other, model = Prefix(seed=1), prefix.model
    wanted = other.logits(other.prefill(100), 100)
    with model.watch.keeping([64]) as kept:
        assert torch.equal(other.logits(other.prefill(100), 100), wanted)
        assert kept == [{}]
        model.forward(prefix.tokens[:100], model.new_cache())
    prefix.check_states(kept[0], prefix.states(64), STATE_BOUND)


def test_of_a_layer_that_does_not_call_its_files_rule_no_state_is_kept():
    """As when a kernel has taken the place of its whole forward."""
    prefix = Prefix()
    layer = prefix.model.dims.linear_layers[1]
    attention = prefix.model._layers[layer].linear_attn
    file = sys.modules[type(attention).__module__]
    own = dict(vars(file)) | {RULE: inspect.unwrap(getattr(file, RULE))}
    attention.forward = MethodType(
        FunctionType(inspect.unwrap(type(attention).forward).__code__, own), attention
    )
    with prefix.model.watch.keeping([64]) as kept:
        prefix.model.forward(prefix.tokens, prefix.model.new_cache())
    assert layer not in kept[0]
    assert len(kept[0]) == len(prefix.model.dims.linear_layers) - 1
    assert not PromptRun(prefix.model, None, prefix.tokens, 1024, Report("", 320)).cold().states


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

    with ThreadPoolExecutor(1) as thread, model.watch.keeping([5]) as kept:
        assert torch.equal(thread.submit(other).result(), wanted)
        assert kept == [{}]
        model.forward(prefix.tokens, cache)
    prefix.check_states(kept[0], prefix.states(5), STATE_BOUND)
    assert torch.equal(other(), wanted)
    with model.watch.keeping([]) as none:
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
    with model.watch.trace() as cut, model.watch.keeping([64, 130]):
        model.forward(any_prefix.tokens[:200], model.new_cache())
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
