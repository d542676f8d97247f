"""A uniform view of a Transformers hybrid model: what the engine runs and replays.

This, `hf_cache.py` and `hf_watch.py` (with `hf_views.py`, `hf_cuts.py` and `hf_families.py`) alone
know Transformers' caches, hooks and layer calls. They work with Transformers 5.19, where a forward
takes `past_key_values=`, and 5.24, where it is `cache=`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tailreplay.connector.hf_cache import HybridCache
from tailreplay.connector.hf_families import family_of
from tailreplay.connector.hf_views import up_to
from tailreplay.connector.hf_watch import Watch, output_of
from tailreplay.connector.model_dims import ModelDims
from tailreplay.replay.groups import FULL, LINEAR, ReplayGroup, replay_groups
from tailreplay.replay.linear_state import LinearState
from tailreplay.replay.state_only import final_state


class HybridModel:
    """A hybrid causal LM with its layers named by index, no batch.

    One forward at a time in each thread. Holds no mutable state of its own.

    Attributes:
        groups: the replay groups, in layer order.
        group_places: of each replay group's layers, their places among the linear layers.
        dims: its shapes, dtype and device, and which layers are of which kind.
        config: the model's own config.
        watch: what is seen of its forwards, and done between its layers.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - any Transformers model
        """Look at `model`, without changing it.

        Args:
            model: a causal LM of Transformers in eval mode, all on one device.

        Raises:
            UnsupportedModel: its family is not in `hf_families.FAMILIES`, or a projection that
                replay cuts is not a plain `torch.nn.Linear` (a quantised or adapted model).
        """
        config = model.config
        self._family = family_of(model)
        self.groups = replay_groups(config.layer_types)
        self.dims = _dims(model, [g.source for g in self.groups if g.source is not None])
        place = {layer: i for i, layer in enumerate(self.dims.linear_layers)}
        self.group_places = [[place[layer] for layer in g.linear_layers] for g in self.groups]
        self.config = config
        self._model = model
        self._layers = model.model.layers
        self._model_cache_name = _cache_name(model)
        self._layer_cache_name = _cache_name(self._layers[self.dims.linear_layers[0]])
        for layer in self.dims.linear_layers:
            self._family.check(self._layers[layer].linear_attn)
        self.watch = Watch(self._layers, self.dims, self._family)

    def new_cache(self) -> HybridCache:
        """Return an empty cache."""
        return HybridCache(self.dims, DynamicCache(config=self.config))

    def forward(self, tokens: Tensor, cache: HybridCache) -> Tensor:
        """Run the model over `tokens`, which follow what `cache` holds.

        Args:
            tokens: `[T]` int64, T >= 1.
            cache: empty, or with KV in every FA layer and a state in every linear layer, all
                after the same token. Grows by T tokens; its states change in place.

        Returns:
            Logits `[V]` after the last token, in the dtype Transformers gives.

        Raises:
            ValueError: wrong `tokens`, or a cache with only a part of the above. (That KV and
                states belong to the same token cannot be seen from here.)
        """
        self.dims.check_tokens(tokens)
        cache.check_complete()
        with torch.no_grad():
            out = self._model(
                input_ids=tokens[None],
                use_cache=True,
                logits_to_keep=1,
                **{self._model_cache_name: cache.inner},
            )
        logits: Tensor = out.logits[0, -1]
        return logits

    def replay_group(
        self,
        group: ReplayGroup,
        rows: Tensor,
        cache: HybridCache,
        initial: Mapping[int, LinearState] | None = None,
    ) -> None:
        """Rebuild the states of a group's linear layers from rows of its source.

        Neither reads nor needs KV or other groups: the order of groups and of loading is free.
        From a zero state (`initial` None) the result is exact if `rows` starts at token 0, else
        approximate, the better the more rows; with fewer than 4 rows don't count on the conv
        states either, for zeros stand where inputs belong (below `conv_width` rows even in the
        first layer). From `initial` it is exact, for any number of rows.

        Args:
            group: one of `groups`.
            rows: `[k, D]` of the model's dtype, k >= 1, consecutive output hiddens of the source;
                for the leading group token ids `[k]` int64.
            cache: gets the states after the last row. Its KV is not touched.
            initial: states after the token before `rows[0]`, for each layer of the group; None
                = zeros, and the layers must have no state yet. Not changed.

        Raises:
            ValueError: a foreign group, wrong rows or states, a missing state, or a layer that
                has a state although `initial` is None.
        """
        x = self._group_input(group, rows)
        start = self._group_start(group, cache, initial)
        *through, last = group.linear_layers
        with torch.no_grad():
            for layer in through:
                if layer in start:
                    cache.set_states({layer: start[layer]})
                x = self._run_layer(layer, x, cache)
            cache.set_states({last: self._final_state(last, x, start.get(last))})

    def _run_layer(self, layer: int, x: Tensor, cache: HybridCache) -> Tensor:
        # A linear layer has no use for positions, and without padding none for a mask.
        out = self._layers[layer](
            x,
            position_embeddings=None,
            attention_mask=None,
            **{self._layer_cache_name: up_to(cache.inner, layer)},
        )
        return output_of(out)

    def _final_state(self, layer: int, x: Tensor, initial: LinearState | None) -> LinearState:
        module = self._layers[layer]
        weights = self._family.state_weights(module.linear_attn)
        return final_state(weights, module.input_layernorm(x)[0], initial)

    def _group_input(self, group: ReplayGroup, rows: Tensor) -> Tensor:
        """Return the rows as the first layer's input `[1, k, D]`."""
        if group not in self.groups:
            raise ValueError(f"{group} is not of this model, wanted one of {self.groups}")
        if group.source is None:
            self.dims.check_tokens(rows)
            with torch.no_grad():
                embedded: Tensor = self._model.model.embed_tokens(rows[None])
            return embedded
        shape = (max(rows.shape[0], 1) if rows.ndim else 1, self.dims.hidden_size)
        self.dims.check(f"rows of source {group.source}", rows, shape, self.dims.dtype)
        return rows[None]

    def _group_start(
        self, group: ReplayGroup, cache: HybridCache, initial: Mapping[int, LinearState] | None
    ) -> Mapping[int, LinearState]:
        """Check that the group can start from `initial`; empty means a zero state."""
        for layer in group.linear_layers:
            if initial is None and cache.has_state(layer):
                raise ValueError(
                    f"layer {layer} has a state, wanted none or `initial` to replace it"
                )
            if initial is not None and layer not in initial:
                raise ValueError(f"`initial` has layers {sorted(initial)}, wanted {layer} as well")
            if initial is not None:
                self.dims.check_state(layer, initial[layer])
        return initial or {}


def _dims(model: Any, hidden_sources: Sequence[int]) -> ModelDims:  # noqa: ANN401 - likewise
    config = model.config
    return ModelDims(
        fa_layers=_of_type(config.layer_types, FULL),
        linear_layers=_of_type(config.layer_types, LINEAR),
        hidden_sources=tuple(hidden_sources),
        kv_heads=config.num_key_value_heads,
        # OLMo-Hybrid's config only implies it.
        kv_head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim - 1,
        hidden_size=config.hidden_size,
        dtype=model.dtype,
        device=model.device,
    )


def _of_type(layer_types: Sequence[str], name: str) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(layer_types) if kind == name)


def _cache_name(module: Any) -> str:  # noqa: ANN401 - a model or a layer of it
    """Return the argument the cache goes by; by another name it is swallowed in silence."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
