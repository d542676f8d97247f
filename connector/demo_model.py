"""The demo's models: miniature hybrids, trained on two novels.

benchmarks/mini/README.md says how, and what they can and cannot do.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, Literal

import torch

from tailreplay.connector.triton_guard import guard_triton

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_CONFIGS = {"qwen3_5_text": "Qwen3_5TextConfig", "olmo_hybrid": "OlmoHybridConfig"}
_MODELS = {"qwen3_5_text": "Qwen3_5ForCausalLM", "olmo_hybrid": "OlmoHybridForCausalLM"}

Name = Literal["retrieval", "state"]
"""retrieval finds what was said by attention, state keeps it in its recurrent states."""


def miniature(
    name: Name | str, dtype: torch.dtype = torch.float32, folder: Traversable | None = None
) -> Any:  # noqa: ANN401 - Transformers is untyped here
    """The miniature `name`, in evaluation mode on the CPU; the same weights in every process.

    Args:
        name: file name of its weights, without the ending.
        dtype: of all weights but the decays `A_log` and `dt_bias`, which stay float32.
        folder: where its files are; None = those that ship with the package.
    """
    guard_triton()
    import transformers as untyped
    from safetensors.torch import load_file

    transformers: Any = untyped
    transformers.utils.logging.set_verbosity_error()
    folder = folder or files("tailreplay.connector").joinpath("data")
    with ExitStack() as stack:
        shape, weights = (
            stack.enter_context(as_file(folder.joinpath(f"{name}.{ending}")))
            for ending in ("json", "safetensors")
        )
        kind = json.loads(shape.read_text(encoding="utf-8"))["model_type"]
        config = getattr(transformers, _CONFIGS[kind]).from_json_file(shape)
        config._attn_implementation = "sdpa"
        model = getattr(transformers, _MODELS[kind])(config).to(dtype)
        for block in model.model.layers:
            if hasattr(block, "linear_attn"):
                block.linear_attn.A_log.data = block.linear_attn.A_log.data.float()
                block.linear_attn.dt_bias.data = block.linear_attn.dt_bias.data.float()
        model.load_state_dict(load_file(weights))
    return model.eval()
