"""What one linear layer remembers of a prefix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearState:
    """The state of one Gated DeltaNet layer after one token.

    Attributes:
        conv: `[channels, W - 1]` in the model's dtype, the last raw inputs of the convolution,
            newest last; channels in the order q, k, v; W = kernel width.
        recurrent: `[HV, K, V]` fp32, K-first.
    """

    conv: Tensor
    recurrent: Tensor
