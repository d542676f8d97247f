"""Shapes of a hybrid model, and tensors held to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tailreplay.replay.linear_state import LinearState


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Shapes of a model, or of one rank's share of it.

    Attributes:
        fa_layers: indices of the full-attention layers.
        linear_layers: indices of the linear layers.
        hidden_sources: FA layers whose output hidden feeds a group, ascending.
        kv_heads: KV heads of the FA layers.
        kv_head_dim: dim of each of them.
        key_heads: H of the linear layers.
        value_heads: HV of the linear layers.
        key_dim: K of the linear layers.
        value_dim: V of the linear layers.
        conv_width: inputs a conv state keeps = kernel width - 1.
        hidden_size: D, width of a hidden row.
        dtype: of weights, hiddens, KV and conv states.
        device: where all of them live.
    """

    fa_layers: tuple[int, ...]
    linear_layers: tuple[int, ...]
    hidden_sources: tuple[int, ...]
    kv_heads: int
    kv_head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of a linear layer's conv state: the raw q, k and v channels, and inputs kept of each."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return channels, self.conv_width

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Of a linear layer's recurrent state, which is fp32: `[HV, K, V]`."""
        return self.value_heads, self.key_dim, self.value_dim

    def check(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Hold a tensor to a shape, a dtype and the model's device.

        Raises:
            ValueError: it has another.
        """
        got, wanted = (tuple(x.shape), x.dtype, x.device), (shape, dtype, self.device)
        if got != wanted:
            raise ValueError(
                f"{name}: got {list(got[0])} {got[1]} on {got[2]}, "
                f"wanted {list(shape)} {dtype} on {self.device}"
            )

    def check_tokens(self, tokens: Tensor) -> None:
        """Hold `tokens` to `[T]` int64, T >= 1; raises as `check`."""
        shape = (max(tokens.shape[0], 1) if tokens.ndim else 1,)
        self.check("tokens", tokens, shape, torch.int64)

    def check_state(self, layer: int, state: LinearState) -> None:
        """Hold a state to the shapes of a linear layer.

        Raises:
            ValueError: no such layer, or a wrong shape, dtype or device.
        """
        if layer not in self.linear_layers:
            raise ValueError(
                f"layer {layer} is no linear layer, wanted one of {self.linear_layers}"
            )
        self.check(f"conv state of layer {layer}", state.conv, self.conv_shape, self.dtype)
        self.check(
            f"recurrent state of layer {layer}",
            state.recurrent,
            self.recurrent_shape,
            torch.float32,
        )
