"""Prompts for vLLM engines, and how far answers lie apart."""

from __future__ import annotations

import random
from typing import Any

VOCAB = 512


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def branch(prompt: list[int], m: int, more: int = 100, turn: int = 1) -> list[int]:
    """A prompt that shares exactly m tokens with `prompt`, and with branches of other turns."""
    return prompt[:m] + [(t + turn) % VOCAB for t in prompt[m : m + more]]


def worst(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> float:
    """Largest difference of first-token log probabilities."""
    pairs = zip(got, wanted, strict=True)
    return max(
        abs(a - b)
        for g, w in pairs
        for a, b in zip(g["first_logprobs"], w["first_logprobs"], strict=True)
    )
