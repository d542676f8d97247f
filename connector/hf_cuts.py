"""States in the middle of a forward: linear attention runs in pieces, all else at once.

A forward of its own for the few tokens behind a cut reads every weight of the model for them. What
a state needs is less: that the linear layers' attention stops there. Hooks do that, which call the
module again for each further piece. Its output projection, which takes each row by itself, runs
once: the pieces are put together in front of it.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailreplay.connector.hf_views import up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@contextmanager
def in_pieces(
    attentions: Mapping[int, torch.nn.Module],
    output: str,
    rows: Sequence[int],
    between: Callable[[int], None],
) -> Iterator[None]:
    """Runs modules of linear attention in pieces, in this thread's forwards inside, without batch.

    Args:
        attentions: by layer; called by Transformers with `hidden_states` `[1, T, D]` and a cache.
        output: names the module in each of them that is called last, with rows of the sequence.
        rows: where they are cut, ascending, each 1 to T - 1.
        between: called with the layer at each cut, when the cache has the state there.
    """
    with ExitStack() as hooks:
        for layer, attention in attentions.items() if rows else ():
            cut = _Cut(layer, rows, between)
            hooks.enter_context(attention.register_forward_pre_hook(cut.before, with_kwargs=True))
            hooks.enter_context(attention.register_forward_hook(cut.after, with_kwargs=True))
            projection = getattr(attention, output)
            hooks.enter_context(projection.register_forward_pre_hook(cut.before_output))
        yield


class _Cut:
    """The hooks of one layer; deaf to other threads, since another engine may share the module."""

    def __init__(self, layer: int, rows: Sequence[int], between: Callable[[int], None]) -> None:
        self._layer, self._rows, self._between = layer, rows, between
        self._owner = threading.get_ident()
        # Of the forward that is on: all its rows, and what its pieces gave so far.
        self._whole: Tensor | None = None
        self._pieces: list[Tensor] = []

    def before(
        self, _module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Has the module run the first piece alone."""
        if threading.get_ident() != self._owner:
            return None
        self._whole = given["hidden_states"]
        cache = "cache" if "cache" in given else "cache_params"  # before Transformers 5.24
        own = up_to(given[cache], self._layer)
        first = self._whole[:, : self._rows[0]]
        return args, given | {"hidden_states": first, cache: own}

    def after(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        given: dict[str, Any],
        out: Tensor,
    ) -> Tensor | None:
        """Runs the other pieces; the last puts out the rows of all of them."""
        if threading.get_ident() != self._owner:
            return None
        whole, self._whole = self._whole, None
        assert whole is not None, "a forward ends that has not begun"
        for start, end in itertools.pairwise([*self._rows, whole.shape[1]]):
            self._between(self._layer)
            # Not by a call, which would run the hooks again.
            out = module.forward(*args, **given | {"hidden_states": whole[:, start:end]})
        return out

    def before_output(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any] | None:
        """Projects nothing until the last piece, then the rows of all."""
        if threading.get_ident() != self._owner:
            return None
        self._pieces.append(args[0])
        if len(self._pieces) <= len(self._rows):
            return (args[0][:, :0],)
        pieces, self._pieces = self._pieces, []
        return (torch.cat(pieces, dim=1),)
