"""What is seen of a Transformers model's forwards, and done between its layers: by hooks.

Hooks hang on modules that several engines may share, each in a thread of its own; all of these are
deaf to forwards of other threads than the one that has hung them.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailreplay.connector.hf_cuts import in_pieces
from tailreplay.replay.hidden_rows import HiddenRows
from tailreplay.replay.state_only import log_decay
from tailreplay.replay.tail_error import DecayTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.connector.hf_families import Family
    from tailreplay.connector.model_dims import ModelDims
    from tailreplay.replay.linear_state import LinearState


class Watch:
    """Contexts in which this thread's forwards are watched. Holds no mutable state of its own.

    Args:
        layers: the model's decoder layers, in order.
        dims: of the model.
        family: how to read its linear layers.
    """

    def __init__(self, layers: torch.nn.ModuleList, dims: ModelDims, family: Family) -> None:
        self._layers: Any = layers
        self._dims = dims
        self._family = family

    @contextmanager
    def capture(self) -> Iterator[HiddenRows]:
        """Collect the output hiddens of the replay sources of this thread's forwards inside.

        Yields:
            An object whose `rows(source)` gives `[T, D]` in the model's dtype, for each of
            `hidden_sources`, also after the context has ended.
        """
        hidden = HiddenRows()

        def keep(source: int) -> Callable[..., None]:
            return _in_this_thread(
                lambda _module, _args, out: hidden.add(source, output_of(out)[0])
            )

        with ExitStack() as hooks:
            for source in self._dims.hidden_sources:
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
        trace = DecayTrace(self._dims.linear_layers, first)

        def note(layer: int) -> Callable[..., None]:
            gdn = self._layers[layer].linear_attn

            def hook(_module: torch.nn.Module, _args: tuple[Any, ...], out: Tensor) -> None:
                a = self._family.decay_rows(gdn, out[0])
                trace.add(layer, log_decay(a, gdn.A_log, gdn.dt_bias))

            return _in_this_thread(hook)

        with ExitStack() as hooks, torch.no_grad():
            for layer in self._dims.linear_layers:
                # What the layer itself works out is taken; of its rows nothing is read again.
                projection = getattr(self._layers[layer].linear_attn, self._family.decay)
                hooks.enter_context(projection.register_forward_hook(note(layer)))
            yield trace

    @contextmanager
    def keeping(self, rows: Sequence[int]) -> Iterator[list[dict[int, LinearState]]]:
        """Keep the states in the middle of this thread's one forward inside.

        Args:
            rows: how many of its tokens they have seen, ascending, each 1 to T - 1.

        Yields:
            A list that has the states of linear layers for each of `rows`, once it has run: of all
            of them, but for any that somebody has had run by other code than its file's.
        """
        kept: list[dict[int, LinearState]] = [{} for _ in rows]
        attentions = {layer: self._layers[layer].linear_attn for layer in self._dims.linear_layers}

        def keep(layer: int, state: LinearState) -> None:
            next(s for s in kept if layer not in s)[layer] = state

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
            for layer in self._dims.fa_layers:
                attention = self._layers[layer].self_attn
                hooks.enter_context(attention.register_forward_pre_hook(call(layer)))
            yield


def output_of(out: Any) -> Tensor:  # noqa: ANN401 - what a decoder layer returns
    """The hiddens `[1, T, D]` among what a decoder layer returns."""
    hidden: Tensor = out if isinstance(out, Tensor) else out[0]
    return hidden


def _in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    owner = threading.get_ident()

    def call(*args: Any) -> None:  # noqa: ANN401 - whatever a hook gets
        if threading.get_ident() == owner:
            hook(*args)

    return call
