"""The short causal convolution in front of the gated delta rule, as a torch reference.

Letters: T tokens, C channels, W kernel width. A conv state holds the last W - 1 raw inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """Convolve each channel with its own kernel over the past W inputs, then apply SiLU.

    Args:
        x: `[T, C]`, T >= 1, raw inputs.
        weight: `[C, W]`, the newest input last. The convolution runs in its dtype.
        initial_state: `[C, W - 1]`, the inputs before `x`, newest last; None = zeros.

    Returns:
        `[T, C]` in x's dtype.

    Source: Gated DeltaNet, arXiv 2412.06464, section 3.4 (short convolution on q, k and v).
    """
    width = weight.shape[-1]
    inputs = _with_past(x, width, initial_state).to(weight.dtype)
    out = F.conv1d(inputs[None], weight[:, None], groups=weight.shape[0])[0]
    return F.silu(out).to(x.dtype).T


def conv_tail(x: Tensor, width: int, initial_state: Tensor | None = None) -> Tensor:
    """Return the conv state after `x`: its last W - 1 rows, filled up from `initial_state`.

    Args:
        x: `[T, C]`, T >= 1, raw inputs; only the last W - 1 rows are read.
        width: W, at least 2.
        initial_state: `[C, W - 1]`, the state before `x`; None = zeros.

    Returns:
        `[C, W - 1]` in x's dtype, newest last; memory of its own.
    """
    return _with_past(x, width, initial_state)[:, -(width - 1) :].clone()


def _with_past(x: Tensor, width: int, initial_state: Tensor | None) -> Tensor:
    """Put the W - 1 inputs before `x` in front of it: `[C, W - 1 + T]`."""
    if initial_state is None:
        return F.pad(x.T, (width - 1, 0))
    return torch.cat([initial_state, x.T], dim=-1)
