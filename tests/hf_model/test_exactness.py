"""What is replayed from exact numbers is a prefill; what is not has to show."""

import pytest
import torch
from hf_prefix import LOGITS_BOUND, STATE_BOUND, SUFFIX, Prefix
from tiny_models import FAMILIES, relative_l2, relative_max

from tailreplay.replay.linear_state import LinearState

pytestmark = pytest.mark.model

BF16_BOUND = 5e-2
"""For both, bf16: its steps are 2^-8, a matrix product of another shape may round the other way,
and later layers grow the difference; two prefills of the same tokens in other chunks differ by
as much (`test_two_ways_to_prefill_differ_as_much_in_bf16`)."""
FAR_OFF = 0.1
"""A wrong state shows as at least this much in the logits: 1000 times the fp32 bound."""
BOUNDARIES = [1, 2, 3, 4, 5, 63, 64, 65, 130, 257, 299]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def long_prefix(request):
    return Prefix(tokens=350, make=request.param)


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
    ("checkpoint", "m"), [(192, 193), (192, 195), (192, 330), (320, 330), (330, 330)]
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


def test_replay_needs_no_kv_and_no_order(any_prefix):
    model, cache = any_prefix.model, any_prefix.model.new_cache()
    for group in reversed(model.groups):
        model.replay_group(group, any_prefix.rows(group, 0, 130), cache)
    any_prefix.check_states(cache.states(), any_prefix.states(130), STATE_BOUND)


def test_replay_does_not_change_the_states_it_starts_from(prefix):
    initial = prefix.states(65)
    prefix.replay(prefix.with_kv(70), 65, 70, initial)
    prefix.check_states(initial, prefix.states(65), 0.0)
