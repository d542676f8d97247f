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
    """The weights that a layer's state depends on, as views of the model's own where they can be.

    Attributes:
        q: `[H K, D]`.
        k: `[H K, D]`.
        v: `[HV V, D]`.
        a: `[HV, D]`, projects to the decay.
        b: `[HV, D]`, projects to beta.
        conv: `[C, W]`, W >= 2, rows in the order q, k, v.
        a_log: `[HV]`.
        dt_bias: `[HV]`.
        key_heads: H.
        beta_max: beta lies in [0, beta_max]; above 1, a state may flip its sign along a key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    beta_max: float = 1.0


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
        arXiv 2405.21060: g = -exp(A_log) softplus(a + dt_bias); beta up to 2: arXiv 2411.12537.
    """
    width = weights.conv.shape[-1]
    conv = None if initial_state is None else initial_state.conv
    recurrent = None if initial_state is None else initial_state.recurrent
    k, v = F.linear(rows, weights.k), F.linear(rows, weights.v)
    q_tail = F.linear(rows[1 - width :], weights.q)
    tail = conv_tail(torch.cat([q_tail, k[1 - width :], v[1 - width :]], dim=-1), width, conv)
    k, v = _convolved(weights, k, v, conv)
    beta = F.linear(rows, weights.b).sigmoid() * weights.beta_max
    g = log_decay(F.linear(rows, weights.a), weights.a_log, weights.dt_bias)
    return LinearState(tail, state_scan(k, v, g, beta, recurrent))


def _convolved(
    weights: StateWeights, k: Tensor, v: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn raw k and v into normalised keys `[T, H, K]` fp32 and values `[T, HV, V]`."""
    channels = weights.k.shape[0]
    k_rows, v_rows = slice(channels, 2 * channels), slice(2 * channels, None)
    past = (None, None) if initial_state is None else (initial_state[k_rows], initial_state[v_rows])
    k = causal_conv(k, weights.conv[k_rows], past[0])
    v = causal_conv(v, weights.conv[v_rows], past[1])
    keys = k.reshape(len(k), weights.key_heads, -1)
    return l2norm(keys.float()), v.reshape(len(v), weights.a_log.shape[0], -1)


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return g `[T, HV]` in fp32 log space; in 16 bits exp(A_log) would lose slow heads.

    Args:
        a: `[T, HV]`, the layer's rows projected to the decay.
        a_log: `[HV]`.
        dt_bias: `[HV]`.

    Source: as `final_state`.
    """
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias)
