"""The shape of a miniature, its first weights, and how it is saved and loaded."""

import math
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save_file
from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from mini.forward import Net, attends
from tailreplay.connector.demo_model import Name, miniature

SHORTEST, LONGEST = 3.0, 3000.0
"""Half-lives in tokens between which the GDN heads are spread at the start."""


def home(name: str) -> Path:
    """Where a committed miniature lies: those of the demo are part of the package."""
    here = Path(__file__).resolve().parent
    return here.parents[1] / "connector" / "data" if name in get_args(Name) else here


def load(name: str, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Net:
    """The miniature `name`, in evaluation mode; `folder` = None is where it is committed."""
    return miniature(name, dtype, folder or home(name))


def shape(
    vocab_size: int, family: str = "qwen3_5_text", **changes: int
) -> Qwen3_5TextConfig | OlmoHybridConfig:
    """The configuration of a miniature: LLLF twice, GDN head dim 64.

    Qwen3.5 has rotary positions on a quarter of FA's dim, OLMo-Hybrid on all of it.
    """
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 8192,
        **changes,
    }
    if family == OlmoHybridConfig.model_type:
        return OlmoHybridConfig(
            pad_token_id=None, eos_token_id=None, attn_implementation="sdpa", **sizes
        )
    return Qwen3_5TextConfig(attn_implementation="sdpa", **{"head_dim": 64, **sizes})


def new_model(config: Qwen3_5TextConfig | OlmoHybridConfig, seed: int, copier: bool = True) -> Net:
    """A float32 model with matrices scaled by fan-in and half-lives spread over the GDN heads.

    Args:
        config: Its shape.
        seed: Of the random weights.
        copier: Whether FA starts by attending to similar tokens and copying them (Qwen3.5 only).
    """
    torch.manual_seed(seed)
    olmo = isinstance(config, OlmoHybridConfig)
    model = OlmoHybridForCausalLM(config) if olmo else Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=_std(name, weight))
        model.lm_head.weight.copy_(0.04 * model.model.embed_tokens.weight)
        for block in model.model.layers:
            if attends(block) and olmo:
                # What FA adds is normed, so that small weights would not make it small.
                block.post_attention_layernorm.weight.zero_()
            elif attends(block) and copier:
                _start_fa(block.self_attn)
        linear = [b.linear_attn for b in model.model.layers if not attends(b)]
        for i, gdn in enumerate(linear):
            _start_gdn(gdn, i, len(linear))
    return model


@torch.no_grad()
def forget_attention(model: Net) -> None:
    """Draws the FA sublayers anew, with an output of zero, so that GDN has to recall."""
    for block in model.model.layers:
        if attends(block):
            for name, weight in block.self_attn.named_parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.0 if "o_proj" in name else _std(name, weight))
                else:
                    weight.zero_()


def half_lives(model: Net) -> list[list[float]]:
    """Half-life in tokens of every GDN head at a gate input of zero, one list a linear layer."""
    lives = []
    for block in model.model.layers:
        if not attends(block):
            gdn = block.linear_attn
            decay = gdn.A_log.float().exp() * torch.nn.functional.softplus(gdn.dt_bias.float())
            lives.append((math.log(2) / decay).tolist())
    return lives


def save(model: Net, path: Path) -> None:
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
    if name.endswith(("in_proj_a.weight", ".a_proj.weight")):
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
    if hasattr(gdn, "in_proj_qkv"):
        gdn.in_proj_qkv.weight[: gdn.key_dim] = gdn.in_proj_qkv.weight[keys]
    else:
        gdn.q_proj.weight.copy_(gdn.k_proj.weight)
    gdn.conv1d.weight[: gdn.key_dim] = gdn.conv1d.weight[keys]
    heads = gdn.dt_bias.numel()
    place = (torch.arange(heads) * layers + layer) / (heads * layers - 1)
    half_life = SHORTEST * (LONGEST / SHORTEST) ** place
    decay = math.log(2) / half_life
    gdn.A_log.zero_()
    gdn.dt_bias.copy_(decay + torch.log(-torch.expm1(-decay)))
