"""Views of a Transformers cache: as it was some tokens ago, up to a layer, and overheard."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Callable


def as_of(cache: DynamicCache, tokens: int) -> DynamicCache:
    """A view of `cache` in which FA layers have seen only `tokens` tokens.

    A forward over the tokens that follow attends to the keys and values that `cache` holds of them,
    in place of its own, which are dropped. States of the linear layers are shared: they change in
    `cache` too.

    Args:
        cache: holds KV of every token that will be run, in each FA layer. Its KV is only read, and
            may be filled until the layer reads it.
        tokens: fewer than it holds.
    """
    view = copy.copy(cache)
    view.layers = [
        _Served(layer.keys, layer.values, tokens)
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        else layer
        for layer in cache.layers
    ]
    return view


def up_to(cache: DynamicCache, layer: int) -> DynamicCache:
    """A view of `cache` in which `layer` is the last.

    OLMo-Hybrid asks whether the cache's last linear layer has a state, and takes it for an answer
    about the one that runs.
    """
    view = copy.copy(cache)
    view.layers = cache.layers[: layer + 1]
    return view


def overheard(cache: DynamicCache, hear: Callable[[Tensor], None]) -> DynamicCache:
    """A view of `cache` that tells what linear layers' convolutions run over.

    Args:
        cache: what is put into the view is put into it.
        hear: called with raw inputs `[1, channels, T']`, the newest last, those of the tokens that
            the layer runs over and what it had kept before them.
    """
    view = copy.copy(cache)

    def update(*given: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as Transformers has it
        inputs: Tensor = cache.update_conv_state(*given, **options)
        hear(inputs)
        return inputs

    view.update_conv_state = update  # type: ignore[method-assign]  # of the view alone
    return view


class _Served(DynamicLayer):
    """Keys and values `[1, H, T, d]` of which a forward sees as many as it has run over."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Transformers has no types there
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._held = keys, values
        self._tokens = tokens

    def get_seq_length(self) -> int:
        return self._tokens

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ANN401 - as Transformers has it
        **kwargs: Any,  # noqa: ANN401 - likewise
    ) -> tuple[Tensor, Tensor]:
        del value_states, args, kwargs
        self._tokens += key_states.shape[-2]
        keys, values = self._held
        return keys[:, :, : self._tokens], values[:, :, : self._tokens]
