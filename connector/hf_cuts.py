"""States in the middle of a forward: the gated delta rule runs in pieces, all else at once.

A forward of its own for the few tokens behind a cut reads every weight of the model for them. What
a state needs is less: that the rule stops there, and goes on from the state that it has. Around a
layer there are hooks; between its projections and the rule there are none. There the layer calls a
function by its name in Transformers' file, a kernel or plain torch, and that name is bound anew,
once for each file: to what calls the same function, in pieces if the thread that runs is to stop.
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tailreplay.connector.hf_views import overheard
from tailreplay.replay.linear_state import LinearState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Rule: TypeAlias = Callable[..., tuple[Tensor, Tensor]]

RULE = "torch_chunk_gated_delta_rule"
"""What Transformers' files of all families call the rule for a prefill."""

_bound = threading.Lock()
_here = threading.local()
"""Mutable state: `stops` is what this thread's forwards stop for, if anything."""


def calls_rule(attention: torch.nn.Module) -> bool:
    """Whether the file of a module of linear attention has the rule by its name."""
    return hasattr(_file_of(attention), RULE)


@contextmanager
def in_pieces(
    attentions: Mapping[int, torch.nn.Module],
    rows: Sequence[int],
    keep: Callable[[int, LinearState], None],
) -> Iterator[None]:
    """Stops the rule of linear layers in this thread's forwards inside, without batch.

    Args:
        attentions: modules by layer, of which `calls_rule` is true; called by Transformers with
            `hidden_states` `[1, T, D]` and a cache.
        rows: where to stop, ascending, each 1 to T - 1.
        keep: called with a layer and its state at each of `rows`, in their order.
    """
    if not rows:
        yield
        return
    stops, before = _Stops(rows, keep), getattr(_here, "stops", None)
    with ExitStack() as hooks:
        for layer, attention in attentions.items():
            _bind(attention)
            hook = partial(stops.before, layer)
            hooks.enter_context(attention.register_forward_pre_hook(hook, with_kwargs=True))
        _here.stops = stops
        try:
            yield
        finally:
            _here.stops = before


class _Stops:
    """Where one thread's forwards stop; deaf to others, since another engine may share a module."""

    def __init__(self, rows: Sequence[int], keep: Callable[[int, LinearState], None]) -> None:
        self._rows, self._keep = rows, keep
        # Of the layer that runs: its number, None outside of one, how many raw inputs a conv state
        # keeps, and the raw inputs [channels, .] up to the forward's last row.
        self._layer: int | None = None
        self._conv_width = 0
        self._inputs = torch.empty(0)

    def before(
        self,
        layer: int,
        attention: Any,  # noqa: ANN401 - a Gated DeltaNet module
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Has a layer's call tell what its convolution runs over."""
        if getattr(_here, "stops", None) is not self:
            return None
        self._layer, self._conv_width = layer, attention.conv1d.weight.shape[-1] - 1
        cache = "cache" if "cache" in given else "cache_params"  # before Transformers 5.24
        return args, given | {cache: overheard(given[cache], self._hear)}

    def _hear(self, inputs: Tensor) -> None:
        self._inputs = inputs[0]

    def run(
        self, rule: Rule, qkv: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """As `rule`, in pieces.

        Args:
            rule: takes q, k and v, and `g`, `beta` and `initial_state` among its options.
            qkv: each `[1, T, heads, dim]`.
            options: what else Transformers gives.
        """
        layer, self._layer = self._layer, None
        if layer is None:  # of a model that is not watched
            return rule(*qkv, **options)
        total, outputs = qkv[0].shape[1], []
        for start, end in itertools.pairwise([0, *self._rows, total]):
            own = {name: options[name][:, start:end] for name in ("g", "beta")}
            out, state = rule(*(x[:, start:end] for x in qkv), **options | own)
            outputs.append(out)
            options = options | {"initial_state": state}
            if end != total:
                # It is the rule's own output, which nobody writes to.
                self._keep(layer, LinearState(self._conv_state(total - end), state[0]))
        return torch.cat(outputs, dim=1), state

    def _conv_state(self, rows_left: int) -> Tensor:
        """The conv state `[channels, conv_width]` that many rows before the forward's end."""
        end = self._inputs.shape[1] - rows_left
        inputs = self._inputs[:, max(end - self._conv_width, 0) : end]
        return F.pad(inputs, (self._conv_width - inputs.shape[1], 0))  # a copy


class _Listening:
    """What a file's name of the rule is bound to.

    Args:
        rule: what it was bound to before.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        update_wrapper(self, rule)

    def __call__(self, *qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        stops: _Stops | None = getattr(_here, "stops", None)
        if stops is None:
            return self._rule(*qkv, **options)
        return stops.run(self._rule, qkv, options)


def _bind(attention: torch.nn.Module) -> None:
    file = _file_of(attention)
    with _bound:
        rule = getattr(file, RULE)
        if not isinstance(rule, _Listening):
            setattr(file, RULE, _Listening(rule))


def _file_of(attention: torch.nn.Module) -> object:
    return sys.modules[type(attention).__module__]
