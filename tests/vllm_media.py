"""Prompts with an image, for a tiny Qwen3.5 with a vision tower.

Transformers' processors for it want torchvision; so pixels are made here, and given to vLLM as its
own processing would have left them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature

IMAGE_TOKEN, IMAGE_TOKENS = 500, 64
VISION_START, VISION_END = 502, 503
_PATCH, _GRID = 8, (1, 16, 16)


def install() -> None:
    """Tells vLLM how long an image is, which it would ask a processor."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo

    def most_tokens(self: Any, seq_len: int, mm_counts: Any) -> dict[str, int]:
        return dict.fromkeys(mm_counts, IMAGE_TOKENS)

    Qwen3VLProcessingInfo.get_mm_max_tokens_per_item = most_tokens


def with_image(prompt: list[int], seed: int, cache_salt: str | None) -> Any:
    """Engine input of a prompt that has one image's tokens; the seed is the image, and its name."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    draw = torch.Generator().manual_seed(seed)
    grid = torch.tensor([_GRID])
    pixels = 10 * torch.randn(int(grid.prod()), 3 * 2 * _PATCH**2, generator=draw)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid})
    place = PlaceholderRange(offset=prompt.index(IMAGE_TOKEN), length=IMAGE_TOKENS)
    return mm_input(
        prompt,
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [f"image {seed}"]},
        {"image": [place]},
        cache_salt=cache_salt,
    )
