"""Decays as trained models have them, for models with random weights.

Transformers' own start values make every linear layer forget within a token, so that any replay
would look perfect.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def draw_decay(model: nn.Module, low: float = 1e-3, high: float = 1e-1) -> None:
    """Draws the time steps dt of every linear layer log-uniformly in [low, high]; changes `model`.

    Source: the initialisation of Mamba-2 (arXiv 2405.21060); dt_bias is softplus's inverse of dt.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            span = math.log(high) - math.log(low)
            dt = torch.exp(torch.rand_like(parameter) * span + math.log(low))
            parameter.data.copy_(dt + torch.log(-torch.expm1(-dt)))
