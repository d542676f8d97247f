"""Prompts for vLLM engines, how far answers lie apart, and what they loaded."""

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


def sizes(found: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind out of the pool, and out of the store."""
    loaded = found["report"]["bytes"]
    return loaded.get("gpu", {}), loaded.get("cpu", {})


def second_hit(engine: Any, prompt: list[int], m: int, salt: str) -> dict[str, Any]:
    """The second prompt that leaves a stored one at m; the first has left the state there."""
    engine.generate(prompts=[prompt], cache_salt=salt)
    engine.generate(prompts=[branch(prompt, m)], cache_salt=salt)
    found: dict[str, Any] = engine.generate(prompts=[branch(prompt, m, turn=2)], cache_salt=salt)[0]
    assert (found["cached"], found["report"]["checkpoint_token"]) == (m, m)
    return found
