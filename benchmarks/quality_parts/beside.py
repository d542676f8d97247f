"""Worked out beside the engine, which does not serve it: hiddens in 8 bits."""

import math

import torch
from mini.forward import Net, Stored, extend, replay
from torch import Tensor

from tailreplay.connector.tail_plan import CONV_ROWS

RATIO = 0.1
BESIDE = "tail 10% fp8"
"""A tail of 10% from hiddens in fp8 (e4m3, a scale a row)."""

_FP8_MAX = 448.0


def tail_rows(m: int) -> int:
    """Rows that are replayed, as in the column of a tail of 10%."""
    return min(m, max(math.ceil(RATIO * m), 4) + CONV_ROWS)


@torch.no_grad()
def prefilled(model: Net, context: list[int]) -> Stored:
    """Keys, values and hiddens of a context."""
    return extend(model, torch.tensor([context]), None)[1]


@torch.no_grad()
def beside(
    model: Net, stored: Stored, prompt: list[int], m: int, new_tokens: int
) -> tuple[Tensor, list[int]]:
    """Logits behind the boundary `[q, V]`, and continuation.

    Args:
        model: the model.
        stored: of a context that the prompt shares m tokens with.
        prompt: token ids.
        m: the boundary.
        new_tokens: how many to generate.
    """
    ids, rows = torch.tensor([prompt]), tail_rows(m)
    kv = {layer: (k[:, :, :m], v[:, :, :m]) for layer, (k, v) in stored.kv.items()}
    hidden = {
        source: h[:, :m] if source < 0 else in_fp8(h[:, :m]) for source, h in stored.hidden.items()
    }
    states = replay(model, hidden, rows)
    return _answered(model, ids[:, m:], Stored(kv, {}, states), new_tokens)


def in_fp8(hidden: Tensor) -> Tensor:
    """Hiddens `[..., D]` as they come back from 8 bits and a scale for each row."""
    scale = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return (hidden / scale).to(torch.float8_e4m3fn).to(hidden.dtype) * scale


def _answered(model: Net, ids: Tensor, past: Stored, new_tokens: int) -> tuple[Tensor, list[int]]:
    out, past = extend(model, ids, past)
    logits = model.lm_head(out[0])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < new_tokens:
        out, past = extend(model, torch.tensor([tokens[-1:]]), past)
        tokens.append(int(model.lm_head(out[0, -1]).argmax()))
    return logits, tokens
