import pytest
import torch

from tailreplay.replay.conv import causal_conv, conv_tail

CHANNELS, WIDTH = 6, 4


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(inputs, weight):
    """The sum over the last W inputs, token by token; `inputs` has W - 1 rows of past."""
    rows = [(inputs[t : t + WIDTH].T * weight).sum(-1) for t in range(inputs.shape[0] - WIDTH + 1)]
    out = torch.stack(rows)
    return out * torch.sigmoid(out)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 40])
def test_conv_without_a_state_sees_zeros_as_past(tokens):
    x, weight = draw(tokens, CHANNELS), draw(CHANNELS, WIDTH, seed=1)
    wanted = by_hand(torch.cat([torch.zeros(WIDTH - 1, CHANNELS, dtype=x.dtype), x]), weight)
    torch.testing.assert_close(causal_conv(x, weight), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_conv_continues_from_the_tail_of_what_came_before(tokens, split):
    x, weight = draw(split + tokens, CHANNELS), draw(CHANNELS, WIDTH, seed=1)
    state = conv_tail(x[:split], WIDTH)
    torch.testing.assert_close(
        causal_conv(x[split:], weight, state),
        causal_conv(x, weight)[split:],
        rtol=1e-12,
        atol=1e-12,
    )
    assert torch.equal(conv_tail(x[split:], WIDTH, state), conv_tail(x, WIDTH))


def test_the_tail_of_few_tokens_has_zeros_on_the_left():
    x = draw(2, CHANNELS)
    tail = conv_tail(x, WIDTH)
    assert torch.equal(tail[:, 0], torch.zeros(CHANNELS, dtype=x.dtype))
    assert torch.equal(tail[:, 1:], x.T)


def test_the_tail_reads_the_last_rows_only_and_owns_its_memory():
    x = torch.full((20, CHANNELS), torch.nan)
    x[-3:] = 1.0
    tail = conv_tail(x, WIDTH)
    x.fill_(torch.nan)
    assert torch.equal(tail, torch.ones(CHANNELS, 3))


def test_conv_keeps_the_inputs_dtype():
    x = draw(5, CHANNELS).bfloat16()
    weight = draw(CHANNELS, WIDTH, seed=1).float()
    assert causal_conv(x, weight).dtype == torch.bfloat16
