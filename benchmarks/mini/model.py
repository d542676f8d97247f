"""The shape of a miniature, its first weights, and how it is saved; `load` ships with the demo."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tailreplay.connector.demo_model import miniature as load

__all__ = ["HOME", "forget_attention", "half_lives", "load", "new_model", "save", "shape"]

HOME = Path(__file__).resolve().parents[2] / "connector" / "data"
"""Where the committed miniatures lie, so that they are part of the package."""

SHORTEST, LONGEST = 3.0, 3000.0
"""Half-lives in tokens between which the GDN heads are spread at the start."""


def shape(vocab_size: int, **changes: int) -> Qwen3_5TextConfig:
    """The configuration of a miniature: LLLF twice, GDN head dim 64, rotary on a quarter of FA."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        **{**sizes, **changes},
    )


def new_model(config: Qwen3_5TextConfig, seed: int, copier: bool = True) -> Qwen3_5ForCausalLM:
    """A float32 model with matrices scaled by fan-in and half-lives spread over the GDN heads.

    Args:
        config: Its shape.
        seed: Of the random weights.
        copier: Whether FA starts by attending to similar tokens and copying them.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=_std(name, weight))
        model.lm_head.weight.copy_(0.04 * model.model.embed_tokens.weight)
        for block in model.model.layers:
            if copier and block.block_type == "full_attention":
                _start_fa(block.self_attn)
        linear = [b.linear_attn for b in model.model.layers if b.block_type == "linear_attention"]
        for i, gdn in enumerate(linear):
            _start_gdn(gdn, i, len(linear))
    return model


@torch.no_grad()
def forget_attention(model: Qwen3_5ForCausalLM) -> None:
    """Draws the FA sublayers anew, with an output of zero, so that GDN has to recall."""
    for block in model.model.layers:
        if block.block_type == "full_attention":
            for name, weight in block.self_attn.named_parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.0 if "o_proj" in name else _std(name, weight))
                else:
                    weight.zero_()


def half_lives(model: Qwen3_5ForCausalLM) -> list[list[float]]:
    """Half-life in tokens of every GDN head at a gate input of zero, one list a linear layer."""
    lives = []
    for block in model.model.layers:
        if block.block_type == "linear_attention":
            gdn = block.linear_attn
            decay = gdn.A_log.float().exp() * torch.nn.functional.softplus(gdn.dt_bias.float())
            lives.append((math.log(2) / decay).tolist())
    return lives


def save(model: Qwen3_5ForCausalLM, path: Path) -> None:
    """Writes the weights as bf16 safetensors (decays stay float32); the shape goes beside them."""
    keep = ("A_log", "dt_bias")
    state = {
        name: (tensor if name.endswith(keep) else tensor.bfloat16()).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, path, metadata={"format": "pt"})
    path.with_suffix(".json").write_text(model.config.to_json_string(use_diff=True))


def _std(name: str, weight: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return 0.5
    fan_in = weight.shape[1] ** -0.5
    if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
        return fan_in * 0.5
    if name.endswith("in_proj_a.weight"):
        return fan_in * 0.3
    return fan_in


def _start_fa(fa: torch.nn.Module) -> None:
    """FA starts by attending to similar tokens and copying them.

    The queries of a head are its keys, its output is the transpose of its values.
    """
    keys = fa.k_proj.weight.unflatten(0, (-1, fa.head_dim))
    queries = fa.q_proj.weight.unflatten(0, (-1, 2 * fa.head_dim))
    queries[:, : fa.head_dim] = keys.repeat_interleave(fa.num_key_value_groups, 0)
    values = fa.v_proj.weight.unflatten(0, (-1, fa.head_dim))
    fa.o_proj.weight.copy_(values.repeat_interleave(fa.num_key_value_groups, 0).flatten(0, 1).T)


def _start_gdn(gdn: torch.nn.Module, layer: int, layers: int) -> None:
    """Queries start as keys; head h of layer i of n has place h * n + i on a log scale of lives."""
    keys = slice(gdn.key_dim, 2 * gdn.key_dim)
    gdn.in_proj_qkv.weight[: gdn.key_dim] = gdn.in_proj_qkv.weight[keys]
    gdn.conv1d.weight[: gdn.key_dim] = gdn.conv1d.weight[keys]
    heads = gdn.dt_bias.numel()
    place = (torch.arange(heads) * layers + layer) / (heads * layers - 1)
    half_life = SHORTEST * (LONGEST / SHORTEST) ** place
    decay = math.log(2) / half_life
    gdn.A_log.zero_()
    gdn.dt_bias.copy_(decay + torch.log(-torch.expm1(-decay)))
