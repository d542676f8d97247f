"""The demo's model: a small Qwen3.5 text hybrid over bytes, with random weights.

Transformers' own start values make every linear layer forget within a token, so that any replay
would look perfect; the decay is therefore drawn as trained models have it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from tailreplay.connector.hf_model import guard_triton

if TYPE_CHECKING:
    from torch import nn

SEED = 20260829


def demo_model() -> Any:  # noqa: ANN401 - Transformers is untyped here
    """The model, in eval mode on the CPU; the same weights in every process."""
    guard_triton()
    import transformers as untyped

    transformers: Any = untyped
    transformers.utils.logging.set_verbosity_error()
    config = transformers.Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=256**-0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = transformers.Qwen3_5ForCausalLM(config)
        draw_decay(model)
    return model.eval()


def draw_decay(model: nn.Module, low: float = 1e-3, high: float = 1e-1) -> None:
    """Draws the time steps dt of every linear layer log-uniformly in [low, high]; changes `model`.

    Source: the initialisation of Mamba-2 (arXiv 2405.21060); dt_bias is softplus's inverse of dt.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            span = math.log(high) - math.log(low)
            dt = torch.exp(torch.rand_like(parameter) * span + math.log(low))
            parameter.data.copy_(dt + torch.log(-torch.expm1(-dt)))
