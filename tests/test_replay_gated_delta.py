import pytest
import torch
from tiny_models import relative_l2

from tailreplay.replay.gated_delta import l2norm, naive, state_scan

STATE_BOUND = 2e-6
"""fp32 scan against an fp64 token loop, relative L2: a few units in the last place of fp32."""


class Inputs:
    """Random fp64 inputs of the rule; decays from nearly none to a factor 20 a token."""

    def __init__(self, tokens, heads=2, value_heads=4, key_dim=16, value_dim=24, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.q = l2norm(self.normal(tokens, heads, key_dim))
        self.k = l2norm(self.normal(tokens, heads, key_dim))
        self.v = self.normal(tokens, value_heads, value_dim)
        self.g = -torch.exp(4 * self.uniform(tokens, value_heads) - 3)
        self.beta = 2 * self.uniform(tokens, value_heads)
        self.state = self.normal(value_heads, key_dim, value_dim)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def truth(self, initial_state=None, tokens=slice(None)):
        inputs = (x[tokens] for x in (self.q, self.k, self.v, self.g, self.beta))
        return naive(*inputs, initial_state)

    def scan(self, initial_state=None, tokens=slice(None), **options):
        inputs = (x[tokens].float() for x in (self.k, self.v, self.g, self.beta))
        state = None if initial_state is None else initial_state.float()
        return state_scan(*inputs, state, **options)


@pytest.mark.parametrize("tokens", range(1, 258))
def test_scan_equals_the_token_loop_at_every_length(tokens):
    inputs = Inputs(tokens, seed=tokens)
    start = inputs.state if tokens % 2 else None
    assert relative_l2(inputs.scan(start), inputs.truth(start)[1]) < STATE_BOUND


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (3, 3), (1, 4), (2, 6)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (8, 24), (24, 8)])
def test_scan_equals_the_token_loop_for_every_shape(
    tokens, with_state, heads, value_heads, key_dim, value_dim
):
    inputs = Inputs(tokens, heads, value_heads, key_dim, value_dim)
    start = inputs.state if with_state else None
    got = inputs.scan(start)
    assert got.shape == (value_heads, key_dim, value_dim)
    assert got.dtype == torch.float32
    assert relative_l2(got, inputs.truth(start)[1]) < STATE_BOUND


@pytest.mark.parametrize("chunk_tokens", [1, 16, 64])
def test_the_chunk_size_changes_rounding_only(chunk_tokens):
    inputs = Inputs(130)
    got = inputs.scan(inputs.state, chunk_tokens=chunk_tokens)
    assert relative_l2(got, inputs.truth(inputs.state)[1]) < STATE_BOUND


@pytest.mark.parametrize("split", [1, 32, 45, 99])
def test_a_scan_continues_where_another_ended(split):
    inputs = Inputs(100)
    middle = inputs.scan(inputs.state, slice(0, split))
    got = inputs.scan(middle, slice(split, None))
    assert relative_l2(got, inputs.truth(inputs.state)[1]) < STATE_BOUND


@pytest.mark.parametrize("padding", [1, 17, 64])
def test_rows_without_key_beta_and_decay_change_nothing(padding):
    inputs = Inputs(padding + 40)
    alone = inputs.scan(inputs.state, slice(padding, None))
    for x in (inputs.k, inputs.beta, inputs.g):
        x[:padding] = 0
    assert relative_l2(inputs.scan(inputs.state), alone) < STATE_BOUND


def test_scan_reads_its_rows_only_and_leaves_the_state_alone():
    inputs = Inputs(70)
    for name in ("k", "v", "g", "beta"):
        x = getattr(inputs, name)
        poisoned = x.new_full((x.shape[0] + 20, *x.shape[1:]), torch.nan)
        poisoned[10:80] = x
        setattr(inputs, name, poisoned)
    start = inputs.state.float()
    before = start.clone()
    got = inputs.scan(start, slice(10, 80))
    assert torch.isfinite(got).all()
    assert torch.equal(start, before)


def test_the_token_loop_is_the_rule_written_out():
    """One head, two tokens, numbers small enough to follow by hand."""
    k = torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]]], dtype=torch.float64)
    v = torch.tensor([[[2.0]], [[1.0]]], dtype=torch.float64)
    beta = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    g = torch.log(torch.tensor([[0.25], [0.5]], dtype=torch.float64))
    outputs, state = naive(k, k, v, g, beta)
    # S1 = k1 (0.5 * 2) = [1, 0]; decayed [0.5, 0]; it reads 0.3, so S2 = [0.5, 0] + k2 * 2 * 0.7.
    wanted = torch.tensor([[[1.34], [1.12]]], dtype=torch.float64)
    torch.testing.assert_close(state, wanted)
    scale = 2**-0.5
    wanted = torch.tensor([[[1.0 * scale]], [[(0.6 * 1.34 + 0.8 * 1.12) * scale]]]).double()
    torch.testing.assert_close(outputs, wanted)


@pytest.mark.parametrize("split", [1, 5, 9])
def test_the_token_loop_continues_from_its_state(split):
    inputs = Inputs(10)
    wanted, final = inputs.truth(inputs.state)
    head, middle = inputs.truth(inputs.state, slice(0, split))
    tail, state = inputs.truth(middle, slice(split, None))
    torch.testing.assert_close(torch.cat([head, tail]), wanted)
    torch.testing.assert_close(state, final)
