"""Small random hybrid models whose linear layers remember as long as trained ones do."""

from __future__ import annotations

from typing import TypeVar

import torch
from decay import draw_decay

from tailreplay.connector.triton_guard import guard_triton

guard_triton()

from transformers import (  # noqa: E402 - after the guard
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

torch.set_num_threads(1)  # more make such small models slower where others work too

Model = TypeVar("Model", bound=PreTrainedModel)

LINEAR_LAYERS = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Grouped values, and K unequal to V."""


def tiny_qwen(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 8,
    hidden: int = 64,
    vocab: int = 256,
    linear: dict[str, int] = LINEAR_LAYERS,
) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 text model, LLLF repeated.

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
        max_position_embeddings=65536,
        # Large enough for every layer to matter to the logits.
        initializer_range=hidden**-0.5,
        **linear,
    )
    return _random(Qwen3_5ForCausalLM, config, dtype, seed)


def tiny_qwen_next(dtype: torch.dtype = torch.float32, seed: int = 0) -> Qwen3NextForCausalLM:
    """A Qwen3-Next model, LLLF twice, with 2 of 4 experts and a shared one for each token."""
    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=65536,
        initializer_range=64**-0.5,
        **LINEAR_LAYERS,
    )
    return _random(Qwen3NextForCausalLM, config, dtype, seed)


def tiny_olmo(dtype: torch.dtype = torch.float32, seed: int = 0) -> OlmoHybridForCausalLM:
    """An OLMo-Hybrid model, LLLF twice, without RoPE and with beta up to 2, as released ones."""
    config = OlmoHybridConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=65536,
        initializer_range=64**-0.5,
        pad_token_id=None,
        eos_token_id=None,
        **LINEAR_LAYERS,
    )
    config.rope_parameters = None  # a default would take the place of None in the arguments
    return _random(OlmoHybridForCausalLM, config, dtype, seed)


FAMILIES = {
    "qwen3_5_text": tiny_qwen,
    "qwen3_next": tiny_qwen_next,
    "olmo_hybrid": tiny_olmo,
}
"""By `config.model_type`. All have the same shapes of KV, hiddens and states."""


def _random(kind: type[Model], config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
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
