"""Taking keys, values and hiddens out of a forward, through operators that compilation keeps.

Each operator copies into a buffer with a fixed address and says that it changes it, so that the
same code serves eager, compiled and graph-captured forwards. A buffer holds one step's rows.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("tailreplay", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("capture_copy(Tensor rows, Tensor(b!) buffer) -> ()")
_LIBRARY.define("capture_kv(Tensor key, Tensor value, Tensor(c!) keys, Tensor(d!) values) -> ()")
_LIBRARY.define("capture_sum(Tensor hidden, Tensor residual, Tensor(b!) buffer) -> ()")


def _copy(rows: Tensor, buffer: Tensor) -> None:
    count = rows.shape[0]
    buffer[:count].copy_(rows.reshape(count, *buffer.shape[1:]))


def _kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
    count = key.shape[0]
    keys[:count].copy_(key.reshape(count, *keys.shape[1:]))
    values[:count].copy_(value.reshape(count, *values.shape[1:]))


def capture_kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copies a forward's rows into the buffers; by the operator only where it is compiled.

    An operator costs more than its two small copies in a step that decodes.
    """
    if torch.compiler.is_compiling():
        torch.ops.tailreplay.capture_kv(key, value, keys, values)
    else:
        _kv(key, value, keys, values)


def _sum(hidden: Tensor, residual: Tensor, buffer: Tensor) -> None:
    torch.add(hidden, residual, out=buffer[: hidden.shape[0]])


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("capture_copy", _copy, _key)
    _LIBRARY.impl("capture_kv", _kv, _key)
    _LIBRARY.impl("capture_sum", _sum, _key)
_LIBRARY._register_fake("capture_copy", lambda rows, buffer: None)
_LIBRARY._register_fake("capture_kv", lambda key, value, keys, values: None)
_LIBRARY._register_fake("capture_sum", lambda hidden, residual, buffer: None)


class Capture:
    """One model's buffers, reachable from each of its attention modules.

    Args:
        model: the inner model: embeddings, decoder layers, final norm.
        sources: FA layers whose output hiddens are captured.
        rows: most rows in a step.
        dtype: of the model.

    Attributes:
        fa_layers: indices of the FA layers, ascending.
        sources: as given.
        attentions: vLLM's Attention module of each FA layer.
    """

    def __init__(
        self,
        model: Any,
        fa_layers: tuple[int, ...],
        sources: tuple[int, ...],
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.fa_layers = fa_layers
        self.sources = sources
        self._model = weakref.ref(model)
        self.attentions = [model.layers[layer].self_attn.attn for layer in fa_layers]
        for attention in self.attentions:
            shape = (rows, attention.num_kv_heads, attention.head_size)
            for name in ("tailreplay_keys", "tailreplay_values"):
                attention.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)
            attention.tailreplay_capture = self
            attention.tailreplay_take = capture_kv
        for source in sources:
            buffer = torch.zeros(rows, model.config.hidden_size, dtype=dtype)
            model.layers[source].register_buffer("tailreplay_hidden", buffer, persistent=False)

    @property
    def model(self) -> Any:
        """The inner model."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone, wanted it alive while its engine runs")
        return model

    def kv_rows(self, rows: int) -> Tensor:
        """Keys and values of the last forward's first `rows` rows, copied: `[L, 2, rows, H, d]`."""
        keys = [a.tailreplay_keys[:rows] for a in self.attentions]
        values = [a.tailreplay_values[:rows] for a in self.attentions]
        pairs = [x for pair in zip(keys, values, strict=True) for x in pair]
        return torch.stack(pairs).view(len(keys), 2, *keys[0].shape)

    def hidden_rows(self, rows: int) -> Tensor:
        """Hiddens of the last forward's first `rows` rows, copied: `[sources, rows, D]`."""
        layers = self.model.layers
        return torch.stack([layers[s].tailreplay_hidden[:rows] for s in self.sources])
