"""One Gated DeltaNet layer, run for its final state alone: how the last layer of a group ends.

No q but for the conv state, no gate z, no output projection, no feed-forward: nobody reads them.
Letters: T tokens, D hidden size, C = 2 H K + HV V channels (q, k, v), W kernel width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tailreplay.replay.conv import causal_conv, conv_tail
from tailreplay.replay.gated_delta import l2norm, state_scan
from tailreplay.replay.linear_state import LinearState


@dataclass(frozen=True, slots=True)
class StateWeights:
    """The weights that a layer's state depends on, as views of the model's own.

    Attributes:
        qkv: `[C, D]`, rows in the order q, k, v.
        a: `[HV, D]`, projects to the decay.
        b: `[HV, D]`, projects to beta.
        conv: `[C, W]`, W >= 2.
        a_log: `[HV]`.
        dt_bias: `[HV]`.
        key_heads: H.
        key_dim: K.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    key_dim: int


def final_state(
    weights: StateWeights, rows: Tensor, initial_state: LinearState | None = None
) -> LinearState:
    """Compute the state after the last of `rows`.

    Args:
        weights: the layer's.
        rows: `[T, D]`, T >= 1, the layer's input after its input norm, in the weights' dtype.
        initial_state: the layer's state after the token before `rows[0]`; None = zeros. Not
            changed.

    Returns:
        A state of its own memory: conv in the rows' dtype, recurrent in fp32.

    Source: Gated DeltaNet, arXiv 2412.06464, section 3.4 and figure 1; the decay as in Mamba-2,
        arXiv 2405.21060: g = -exp(A_log) softplus(a + dt_bias).
    """
    width, q_channels = weights.conv.shape[-1], weights.key_heads * weights.key_dim
    conv = None if initial_state is None else initial_state.conv
    recurrent = None if initial_state is None else initial_state.recurrent
    kv = F.linear(rows, weights.qkv[q_channels:])
    q_tail = F.linear(rows[1 - width :], weights.qkv[:q_channels])
    tail = conv_tail(torch.cat([q_tail, kv[1 - width :]], dim=-1), width, conv)
    past = None if conv is None else conv[q_channels:]
    k, v = _keys_values(weights, causal_conv(kv, weights.conv[q_channels:], past))
    beta = F.linear(rows, weights.b).sigmoid()
    return LinearState(tail, state_scan(k, v, _decay(weights, rows), beta, recurrent))


def _keys_values(weights: StateWeights, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Split `[T, H K + HV V]` into normalised keys `[T, H, K]` fp32 and values `[T, HV, V]`."""
    tokens, k_channels = kv.shape[0], weights.key_heads * weights.key_dim
    k = kv[:, :k_channels].reshape(tokens, weights.key_heads, weights.key_dim)
    v = kv[:, k_channels:].reshape(tokens, weights.a_log.shape[0], -1)
    return l2norm(k.float()), v


def _decay(weights: StateWeights, rows: Tensor) -> Tensor:
    """Return g `[T, HV]` in fp32 log space; in 16 bits exp(A_log) would lose slow heads."""
    step = F.softplus(F.linear(rows, weights.a).float() + weights.dt_bias)
    return -weights.a_log.float().exp() * step
