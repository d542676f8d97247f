"""Small random hybrid models whose linear layers remember as long as trained ones do."""

from __future__ import annotations

import torch

from tailreplay.connector.demo_model import draw_decay
from tailreplay.connector.hf_model import guard_triton

guard_triton()

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402 - after the guard


def tiny_qwen(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 8,
    hidden: int = 64,
    vocab: int = 256,
) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 text model (LLLF repeated) with grouped values, and K unequal to V.

    The same arguments give the same weights. The global random state is left as it was.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=65536,
        # Large enough for every layer to matter to the logits.
        initializer_range=hidden**-0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(config)
        draw_decay(model)
    return model.to(dtype).eval()


def random_tokens(count: int, seed: int = 0, vocab: int = 256) -> torch.Tensor:
    """Token ids `[count]` int64."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


def relative_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far a state is off, for one layer."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def relative_max(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far logits are off."""
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
