"""What a Transformers cache holds of a hybrid model: read, written, and seen from earlier on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from tailreplay.connector.hf_views import as_of
from tailreplay.replay.linear_state import LinearState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailreplay.connector.model_dims import ModelDims
    from tailreplay.replay.tail_error import DecayTrace


class HybridCache:
    """KV of every full-attention layer and the state of every linear one; no batch.

    Args:
        dims: of the model.
        inner: Transformers' own, with one layer of the right kind per model layer.

    Attributes:
        inner: what a forward takes, and changes.
    """

    def __init__(self, dims: ModelDims, inner: DynamicCache) -> None:
        self._dims = dims
        self.inner = inner

    @property
    def tokens(self) -> int:
        """How many tokens' KV it holds."""
        return int(self.inner.get_seq_length())

    def install_kv(self, fa_layer: int, keys: Tensor, values: Tensor) -> None:
        """Make `keys` and `values` what `fa_layer` holds, without copying or reading them.

        They may be filled later, by another thread, until `Watch.waiting` lets the layer read. A
        forward does not write to them: it puts its own KV behind a copy.

        Args:
            fa_layer: index of an FA layer; what it held is dropped.
            keys: `[H, m, d]`, m >= 1, after RoPE and key norm, at positions 0 to m - 1.
            values: `[H, m, d]`.

        Raises:
            ValueError: no such FA layer, or a wrong shape, dtype or device.
        """
        slot, dims = self._slot(fa_layer, self._dims.fa_layers, "FA"), self._dims
        tokens = keys.shape[1] if keys.ndim == 3 else 0
        shape = (dims.kv_heads, max(tokens, 1), dims.kv_head_dim)
        dims.check(f"keys of layer {fa_layer}", keys, shape, dims.dtype)
        dims.check(f"values of layer {fa_layer}", values, shape, dims.dtype)
        slot.lazy_initialization(keys[None], values[None])
        slot.keys, slot.values = keys[None], values[None]

    def kv(self, fa_layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values `[H, T, d]` that `fa_layer` holds.

        Raises:
            ValueError: no such FA layer, or it holds nothing.
        """
        slot = self._slot(fa_layer, self._dims.fa_layers, "FA")
        if not slot.get_seq_length():
            raise ValueError(f"FA layer {fa_layer} holds no tokens, wanted at least 1")
        return slot.keys[0], slot.values[0]

    def has_state(self, layer: int) -> bool:
        """Whether a linear layer has a state."""
        return bool(self.inner.has_previous_state(layer))

    def state(self, layer: int) -> LinearState:
        """Copy the state of a linear layer; a forward would change it in place.

        Raises:
            ValueError: no such linear layer, or it has no state.
        """
        slot = self._slot(layer, self._dims.linear_layers, "linear")
        if not self.has_state(layer):
            raise ValueError(f"linear layer {layer} has no state, wanted one")
        conv = slot.conv_states[0][0, :, -self._dims.conv_width :].clone()
        return LinearState(conv, slot.recurrent_states[0][0].clone())

    def states(self) -> dict[int, LinearState]:
        """As `state`, of every linear layer."""
        return {layer: self.state(layer) for layer in self._dims.linear_layers}

    def note_states(self, trace: DecayTrace, token: int) -> None:
        """Note in `trace` the norms of the states, which are those after `token` tokens.

        Raises:
            ValueError: a linear layer has no state.
        """
        layers = self._dims.linear_layers
        if missing := [layer for layer in layers if not self.has_state(layer)]:
            raise ValueError(f"linear layers {missing} have no state, wanted one in each")
        slots = [self._slot(layer, layers, "linear") for layer in layers]
        trace.note_states(token, [slot.recurrent_states[0][0] for slot in slots])

    def set_states(self, states: Mapping[int, LinearState]) -> None:
        """Copy `states` into the cache, over what these linear layers held.

        Args:
            states: by linear layer; others keep what they hold. Checked before any is written.

        Raises:
            ValueError: no such linear layer, or a wrong shape, dtype or device.
        """
        for layer, state in states.items():
            self._dims.check_state(layer, state)
        for layer, state in states.items():
            # Transformers keeps one input more than is ever read; and it marks a layer as having
            # a state only in update_conv_state, so that comes first and nothing is assigned.
            conv = F.pad(state.conv, (1, 0))[None]
            width = self._dims.conv_width + 1
            self.inner.update_conv_state(conv, layer, conv_kernel_size=width)
            self.inner.update_recurrent_state(state.recurrent[None], layer)

    def as_of(self, tokens: int) -> HybridCache:
        """A view as of `tokens` tokens ago: see `hf_views.as_of`."""
        return HybridCache(self._dims, as_of(self.inner, tokens))

    def check_complete(self) -> None:
        """Refuse a cache of which Transformers would silently use only a part.

        Raises:
            ValueError: FA layers hold different numbers of tokens, or states are missing or there
                without them. (That KV and states belong to the same token cannot be seen here.)
        """
        dims = self._dims
        slots = {layer: self._slot(layer, dims.fa_layers, "FA") for layer in dims.fa_layers}
        lengths = {layer: slot.get_seq_length() for layer, slot in slots.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"FA layers hold {lengths} tokens, wanted the same number in each")
        length = max(lengths.values(), default=0)
        odd = [x for x in dims.linear_layers if self.has_state(x) != (length > 0)]
        if odd:
            wanted = "a state" if length else "none"
            raise ValueError(
                f"the cache holds KV of {length} tokens; wanted {wanted} in linear layers {odd}"
            )

    def _slot(self, layer: int, layers: Sequence[int], kind: str) -> Any:  # noqa: ANN401
        if layer not in layers:
            raise ValueError(f"layer {layer} is no {kind} layer, wanted one of {tuple(layers)}")
        return self.inner.layers[layer]
