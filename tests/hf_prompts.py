"""Prompts of the Transformers engine's tests."""

from case_helpers import (
    prompt,
)

LONG = prompt(3300)
SHORT = prompt(320, seed=5)
