"""A uniform view of a Transformers hybrid model: what the engine reads, writes and replays.

The only module of the connector that knows Transformers' caches, hooks and layer calls. It works
with Transformers 5.19, where a forward takes `past_key_values=`, and 5.24, where it is `cache=`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from tailreplay.connector.hf_cuts import in_pieces
from tailreplay.connector.hf_families import UnsupportedModel, family_of
from tailreplay.connector.hf_views import up_to
from tailreplay.replay.groups import FULL, LINEAR, ReplayGroup, replay_groups
from tailreplay.replay.hidden_rows import HiddenRows
from tailreplay.replay.linear_state import LinearState
from tailreplay.replay.state_only import final_state, log_decay
from tailreplay.replay.tail_error import DecayTrace

__all__ = ["HybridModel", "LinearState", "UnsupportedModel", "guard_triton"]


class HybridModel:
    """A hybrid causal LM with its layers named by index, its cache by layer, no batch.

    One forward at a time in each thread: `capture` and `waiting` hang hooks on the shared modules,
    which pass over what other threads run on them. Holds no mutable state of its own.

    Attributes:
        groups: the replay groups, in layer order.
        group_places: of each replay group's layers, their places among the linear layers.
        fa_layers: indices of the full-attention layers.
        linear_layers: indices of the linear layers.
        hidden_sources: FA layers whose output hidden feeds a group, ascending.
        config: the model's own config.
        dtype: of weights, hiddens, KV and conv states.
        device: where all of them live.
        conv_width: inputs a conv state keeps = kernel width - 1.
        key_heads: H of the linear layers.
        value_heads: HV of the linear layers.
        key_dim: K of the linear layers.
        value_dim: V of the linear layers.
        kv_heads: KV heads of the FA layers.
        kv_head_dim: dim of each of them.
        hidden_size: D, width of a hidden row.
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
        self.fa_layers = _of_type(config.layer_types, FULL)
        self.linear_layers = _of_type(config.layer_types, LINEAR)
        place = {layer: i for i, layer in enumerate(self.linear_layers)}
        self.group_places = [[place[layer] for layer in g.linear_layers] for g in self.groups]
        self.hidden_sources = tuple(g.source for g in self.groups if g.source is not None)
        self.config = config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.conv_width: int = config.linear_conv_kernel_dim - 1
        self.key_heads: int = config.linear_num_key_heads
        self.value_heads: int = config.linear_num_value_heads
        self.key_dim: int = config.linear_key_head_dim
        self.value_dim: int = config.linear_value_head_dim
        self.kv_heads: int = config.num_key_value_heads
        self.kv_head_dim: int = _head_dim(config)
        self.hidden_size: int = config.hidden_size
        self._model = model
        self._layers = model.model.layers
        self._model_cache_name = _cache_name(model)
        self._layer_cache_name = _cache_name(self._layers[self.linear_layers[0]])
        for layer in self.linear_layers:
            self._family.check(self._layers[layer].linear_attn)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache with one layer of the right kind per model layer."""
        return DynamicCache(config=self.config)

    def forward(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
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
        self._check_tokens(tokens)
        self._check_complete(cache)
        with torch.no_grad():
            out = self._model(
                input_ids=tokens[None],
                use_cache=True,
                logits_to_keep=1,
                **{self._model_cache_name: cache},
            )
        logits: Tensor = out.logits[0, -1]
        return logits

    @contextmanager
    def capture(self) -> Iterator[HiddenRows]:
        """Collect the output hiddens of the replay sources of this thread's forwards inside.

        Yields:
            An object whose `rows(source)` gives `[T, D]` in the model's dtype, for each of
            `hidden_sources`, also after the context has ended.
        """
        hidden = HiddenRows()

        def keep(source: int) -> Callable[..., None]:
            return _in_this_thread(lambda _module, _args, out: hidden.add(source, _tensor(out)[0]))

        with ExitStack() as hooks:
            for source in self.hidden_sources:
                hooks.enter_context(self._layers[source].register_forward_hook(keep(source)))
            yield hidden

    @contextmanager
    def trace(self, first: int = 0) -> Iterator[DecayTrace]:
        """Note the decays of every linear layer in this thread's forwards inside.

        Args:
            first: position of the first token that is run.

        Yields:
            The trace; it has no norms of states but those the caller notes.
        """
        trace = DecayTrace(self.linear_layers, first)

        def note(layer: int) -> Callable[..., None]:
            gdn = self._layers[layer].linear_attn
            a = self._family.decay_weight(gdn)
            return _in_this_thread(
                lambda _module, _args, out: trace.add(
                    layer, log_decay(out[0], a, gdn.A_log, gdn.dt_bias)
                )
            )

        with ExitStack() as hooks, torch.no_grad():
            for layer in self.linear_layers:
                norm = self._layers[layer].input_layernorm
                hooks.enter_context(norm.register_forward_hook(note(layer)))
            yield trace

    @contextmanager
    def keeping(
        self, rows: Sequence[int], cache: DynamicCache
    ) -> Iterator[list[dict[int, LinearState]]]:
        """Keep the states in the middle of this thread's one forward inside.

        Args:
            rows: how many of its tokens they have seen, ascending, each 1 to T - 1.
            cache: the forward's.

        Yields:
            A list that has the states of all linear layers for each of `rows`, once it has run.
        """
        kept: list[dict[int, LinearState]] = [{} for _ in rows]
        attentions = {layer: self._layers[layer].linear_attn for layer in self.linear_layers}

        def keep(layer: int) -> None:
            next(s for s in kept if layer not in s)[layer] = self._state(cache, layer)

        with in_pieces(attentions, rows, keep):
            yield kept

    @contextmanager
    def waiting(self, before_fa: Callable[[int], None]) -> Iterator[None]:
        """Call `before_fa(fa_layer)` right before that layer reads the cache, in each forward.

        Of this thread's forwards, in layer order; an exception of it ends the forward.
        The length of every layer's KV has to be right before the forward starts, its contents
        only when `before_fa` returns for it.
        """

        def call(layer: int) -> Callable[..., None]:
            return _in_this_thread(lambda *_: before_fa(layer))

        with ExitStack() as hooks:
            for layer in self.fa_layers:
                attention = self._layers[layer].self_attn
                hooks.enter_context(attention.register_forward_pre_hook(call(layer)))
            yield

    def install_kv(self, cache: DynamicCache, fa_layer: int, keys: Tensor, values: Tensor) -> None:
        """Make `keys` and `values` what `fa_layer` holds, without copying or reading them.

        They may be filled later, by another thread, until `waiting` lets the layer read. A
        forward does not write to them: it puts its own KV behind a copy.

        Args:
            cache: the cache; what the layer held is dropped.
            fa_layer: index of an FA layer.
            keys: `[H, m, d]`, m >= 1, after RoPE and key norm, at positions 0 to m - 1.
            values: `[H, m, d]`.

        Raises:
            ValueError: no such FA layer, or a wrong shape, dtype or device.
        """
        slot = self._slot(cache, fa_layer, self.fa_layers, "FA")
        tokens = keys.shape[1] if keys.ndim == 3 else 0
        shape = (self.kv_heads, max(tokens, 1), self.kv_head_dim)
        self._check(f"keys of layer {fa_layer}", keys, shape, self.dtype)
        self._check(f"values of layer {fa_layer}", values, shape, self.dtype)
        slot.lazy_initialization(keys[None], values[None])
        slot.keys, slot.values = keys[None], values[None]

    def kv(self, cache: DynamicCache, fa_layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values `[H, T, d]` that `fa_layer` holds.

        Raises:
            ValueError: no such FA layer, or it holds nothing.
        """
        slot = self._slot(cache, fa_layer, self.fa_layers, "FA")
        if not slot.get_seq_length():
            raise ValueError(f"FA layer {fa_layer} holds no tokens, wanted at least 1")
        return slot.keys[0], slot.values[0]

    def states(self, cache: DynamicCache) -> dict[int, LinearState]:
        """Copy the state of every linear layer; a forward would change the cache's in place.

        Raises:
            ValueError: a linear layer has no state.
        """
        return {layer: self._state(cache, layer) for layer in self.linear_layers}

    def note_states(self, trace: DecayTrace, token: int, cache: DynamicCache) -> None:
        """Note in `trace` the norms of the states that `cache` holds after `token` tokens.

        Raises:
            ValueError: a linear layer has no state.
        """
        slots = [
            self._slot(cache, layer, self.linear_layers, "linear") for layer in self.linear_layers
        ]
        if not all(cache.has_previous_state(layer) for layer in self.linear_layers):
            raise ValueError("a linear layer has no state, wanted one in each")
        trace.note_states(token, [slot.recurrent_states[0][0] for slot in slots])

    def set_states(self, cache: DynamicCache, states: Mapping[int, LinearState]) -> None:
        """Copy `states` into the cache, over what these linear layers held.

        Args:
            cache: the cache.
            states: by linear layer; others keep what they hold. Checked before any is written.

        Raises:
            ValueError: no such linear layer, or a wrong shape, dtype or device.
        """
        for layer, state in states.items():
            self._check_state(layer, state)
        for layer, state in states.items():
            # Transformers keeps one input more than is ever read; and it marks a layer as having
            # a state only in update_conv_state, so that comes first and nothing is assigned.
            conv = F.pad(state.conv, (1, 0))[None]
            cache.update_conv_state(conv, layer, conv_kernel_size=self.conv_width + 1)
            cache.update_recurrent_state(state.recurrent[None], layer)

    def replay_group(
        self,
        group: ReplayGroup,
        rows: Tensor,
        cache: DynamicCache,
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
                    self.set_states(cache, {layer: start[layer]})
                x = self._run_layer(layer, x, cache)
            self.set_states(cache, {last: self._final_state(last, x, start.get(last))})

    def _run_layer(self, layer: int, x: Tensor, cache: DynamicCache) -> Tensor:
        # A linear layer has no use for positions, and without padding none for a mask.
        out = self._layers[layer](
            x,
            position_embeddings=None,
            attention_mask=None,
            **{self._layer_cache_name: up_to(cache, layer)},
        )
        return _tensor(out)

    def _final_state(self, layer: int, x: Tensor, initial: LinearState | None) -> LinearState:
        module = self._layers[layer]
        weights = self._family.state_weights(module.linear_attn)
        return final_state(weights, module.input_layernorm(x)[0], initial)

    def _group_input(self, group: ReplayGroup, rows: Tensor) -> Tensor:
        """Return the rows as the first layer's input `[1, k, D]`."""
        if group not in self.groups:
            raise ValueError(f"{group} is not of this model, wanted one of {self.groups}")
        if group.source is None:
            self._check_tokens(rows)
            with torch.no_grad():
                embedded: Tensor = self._model.model.embed_tokens(rows[None])
            return embedded
        shape = (max(rows.shape[0], 1) if rows.ndim else 1, self.hidden_size)
        self._check(f"rows of source {group.source}", rows, shape, self.dtype)
        return rows[None]

    def _group_start(
        self, group: ReplayGroup, cache: DynamicCache, initial: Mapping[int, LinearState] | None
    ) -> Mapping[int, LinearState]:
        """Check that the group can start from `initial`; empty means a zero state."""
        for layer in group.linear_layers:
            if initial is None and cache.has_previous_state(layer):
                raise ValueError(
                    f"layer {layer} has a state, wanted none or `initial` to replace it"
                )
            if initial is not None and layer not in initial:
                raise ValueError(f"`initial` has layers {sorted(initial)}, wanted {layer} as well")
            if initial is not None:
                self._check_state(layer, initial[layer])
        return initial or {}

    def _state(self, cache: DynamicCache, layer: int) -> LinearState:
        slot = self._slot(cache, layer, self.linear_layers, "linear")
        if not cache.has_previous_state(layer):
            raise ValueError(f"linear layer {layer} has no state, wanted one")
        conv = slot.conv_states[0][0, :, -self.conv_width :].clone()
        return LinearState(conv, slot.recurrent_states[0][0].clone())

    def _slot(self, cache: DynamicCache, layer: int, layers: Sequence[int], kind: str) -> Any:  # noqa: ANN401
        if layer not in layers:
            raise ValueError(f"layer {layer} is no {kind} layer, wanted one of {tuple(layers)}")
        return cache.layers[layer]

    def _check_complete(self, cache: DynamicCache) -> None:
        """Refuse a cache of which Transformers would silently use only a part."""
        slots = {layer: self._slot(cache, layer, self.fa_layers, "FA") for layer in self.fa_layers}
        lengths = {layer: slot.get_seq_length() for layer, slot in slots.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"FA layers hold {lengths} tokens, wanted the same number in each")
        length = max(lengths.values(), default=0)
        odd = [x for x in self.linear_layers if cache.has_previous_state(x) != (length > 0)]
        if odd:
            wanted = "a state" if length else "none"
            raise ValueError(
                f"the cache holds KV of {length} tokens; wanted {wanted} in linear layers {odd}"
            )

    def _check_tokens(self, tokens: Tensor) -> None:
        shape = (max(tokens.shape[0], 1) if tokens.ndim else 1,)
        self._check("tokens", tokens, shape, torch.int64)

    def _check_state(self, layer: int, state: LinearState) -> None:
        if layer not in self.linear_layers:
            raise ValueError(
                f"layer {layer} is no linear layer, wanted one of {self.linear_layers}"
            )
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        conv = (channels, self.conv_width)
        recurrent = (self.value_heads, self.key_dim, self.value_dim)
        self._check(f"conv state of layer {layer}", state.conv, conv, self.dtype)
        self._check(f"recurrent state of layer {layer}", state.recurrent, recurrent, torch.float32)

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        got, wanted = (tuple(x.shape), x.dtype, x.device), (shape, dtype, self.device)
        if got != wanted:
            raise ValueError(
                f"{name}: got {list(got[0])} {got[1]} on {got[2]}, "
                f"wanted {list(shape)} {dtype} on {self.device}"
            )


def guard_triton() -> None:
    """Keep Transformers from fla's GPU kernels on a machine without a GPU.

    Transformers takes them whenever `fla` can be imported, which it can if triton is there, and
    then fails at the first forward ("0 active drivers"). Call it before the model's class is
    imported; afterwards it is too late. Does nothing if there is an accelerator or no triton.
    Else no code of this process can import `fla` any more.
    """
    if torch.accelerator.is_available() or not _importable("triton"):
        return
    sys.modules["fla"] = None  # type: ignore[assignment] # how Python marks "not importable"


def _importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _head_dim(config: Any) -> int:  # noqa: ANN401 - any Transformers config
    """Return the dim of an FA head, which OLMo-Hybrid's config only implies."""
    dim: int = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return dim


def _of_type(layer_types: Sequence[str], name: str) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(layer_types) if kind == name)


def _cache_name(module: Any) -> str:  # noqa: ANN401 - a model or a layer of it
    """Return the argument the cache goes by; by another name it is swallowed in silence."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook`, deaf to forwards of other threads: another engine may share the modules."""
    owner = threading.get_ident()

    def call(*args: Any) -> None:  # noqa: ANN401 - whatever a hook gets
        if threading.get_ident() == owner:
            hook(*args)

    return call


def _tensor(out: Any) -> Tensor:  # noqa: ANN401 - what a decoder layer returns
    hidden: Tensor = out if isinstance(out, Tensor) else out[0]
    return hidden
