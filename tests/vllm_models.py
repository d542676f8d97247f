"""Tiny random hybrids on disk, for vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from tailreplay.connector.demo_model import draw_decay
from tailreplay.connector.hf_model import guard_triton

guard_triton()

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402 - after the guard


def qwen35(folder: Path, *, layers: int = 8, hidden: int = 128, vocab: int = 512) -> Path:
    """A Qwen3.5 text model (LLLF repeated) in bfloat16."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=hidden**-0.5,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    draw_decay(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
