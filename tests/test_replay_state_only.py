import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_models import relative_l2

from tailreplay.replay.conv import causal_conv
from tailreplay.replay.gated_delta import l2norm, naive
from tailreplay.replay.state_only import StateWeights, final_state

HIDDEN, H, HV, K, V, WIDTH = 32, 2, 4, 8, 12, 4
CHANNELS = 2 * H * K + HV * V


@pytest.fixture(scope="module", params=[1.0, 2.0], ids=["beta to 1", "beta to 2"])
def weights(request):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return StateWeights(
        q=draw(H * K, HIDDEN) * HIDDEN**-0.5,
        k=draw(H * K, HIDDEN) * HIDDEN**-0.5,
        v=draw(HV * V, HIDDEN) * HIDDEN**-0.5,
        a=draw(HV, HIDDEN) * HIDDEN**-0.5,
        b=draw(HV, HIDDEN) * HIDDEN**-0.5,
        conv=draw(CHANNELS, WIDTH) * WIDTH**-0.5,
        a_log=draw(HV),
        dt_bias=draw(HV) - 4,
        key_heads=H,
        beta_max=request.param,
    )


def projected(weights, rows):
    """Raw q, k and v `[T, C]`, side by side."""
    return F.linear(rows, torch.cat([weights.q, weights.k, weights.v]))


def rows_of(tokens):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))


def in_dtype(weights, dtype):
    tensors = {
        field.name: getattr(weights, field.name).to(dtype)
        for field in dataclasses.fields(weights)
        if field.type == "Tensor"
    }
    return dataclasses.replace(weights, **tensors)


def whole_layer(weights, rows):
    """The state by the straight way in fp64: every channel, every token, one by one."""
    w, rows = in_dtype(weights, torch.float64), rows.double()
    qkv = causal_conv(projected(w, rows), w.conv)
    q, k = (l2norm(x.reshape(-1, H, K)) for x in (qkv[:, : H * K], qkv[:, H * K : 2 * H * K]))
    v = qkv[:, 2 * H * K :].reshape(-1, HV, V)
    g = -w.a_log.exp() * F.softplus(F.linear(rows, w.a) + w.dt_bias)
    return naive(q, k, v, g, F.linear(rows, w.b).sigmoid() * w.beta_max)[1]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 33, 100])
def test_the_state_is_that_of_the_whole_layer(weights, tokens):
    rows = rows_of(tokens)
    got = final_state(weights, rows)
    assert relative_l2(got.recurrent, whole_layer(weights, rows)) < 2e-6
    inputs = F.pad(projected(weights, rows).T, (WIDTH - 1, 0))
    torch.testing.assert_close(got.conv, inputs[:, 1 - WIDTH :])


@pytest.mark.parametrize("split", [1, 2, 3, 4, 50])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_it_restarts_exactly_from_a_state(weights, split, tokens):
    rows = rows_of(split + tokens)
    got = final_state(weights, rows[split:], final_state(weights, rows[:split]))
    wanted = final_state(weights, rows)
    assert relative_l2(got.recurrent, wanted.recurrent) < 2e-6
    torch.testing.assert_close(got.conv, wanted.conv)


def test_queries_reach_the_conv_state_only(weights):
    nan = torch.full_like(weights.q, torch.nan)
    got = final_state(dataclasses.replace(weights, q=nan), rows_of(40))
    assert torch.equal(got.recurrent, final_state(weights, rows_of(40)).recurrent)
    assert got.conv[: H * K].isnan().all()
    assert got.conv[H * K :].isfinite().all()


def test_16_bit_weights_give_a_16_bit_conv_and_a_32_bit_recurrent_state(weights):
    got = final_state(in_dtype(weights, torch.bfloat16), rows_of(9).bfloat16())
    assert got.conv.dtype == torch.bfloat16
    assert got.recurrent.dtype == torch.float32
