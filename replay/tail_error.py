"""How long a tail must be so that the states it rebuilds are off by no more than a budget.

What is dropped in front of a tail shrinks by the product of the tail's decays. From log decays and
state norms of a prefill alone, without any replay, that tells the error of every tail beforehand.
Letters: T tokens, L linear layers, HV value heads, E ends, S tail lengths tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BUDGETS = (0.3, 0.1, 0.03)
"""Relative state errors for which a tail's length is worked out."""

SHORTEST_TAIL = 4
"""A tail is a multiple of this many tokens; below it not even a conv state could be right."""

_STEPS_AN_OCTAVE = 4
_ENDS_AT_ONCE = 64
_ENDS_APART = 16
"""Within a span the tail is worked out for an end at every so many tokens."""


class DecayTrace:
    """What a prefill tells of its linear layers' memory, gathered forward by forward.

    Not thread-safe: one forward at a time adds to it.

    Args:
        linear_layers: L layers, in the order in which they add.
        first: position of the first token.
    """

    def __init__(self, linear_layers: Sequence[int], first: int = 0) -> None:
        self.first = first
        # Mutable state: per layer the log decays [t, HV] as they came; per token norms [L, HV].
        self._decays: dict[int, list[Tensor]] = {layer: [] for layer in linear_layers}
        self._norms: dict[int, Tensor] = {}

    def add(self, layer: int, log_decay: Tensor) -> None:
        """Appends g `[t, HV]` of a layer, at most 0."""
        self._decays[layer].append(log_decay.detach())

    def note_states(self, token: int, recurrent: Sequence[Tensor]) -> None:
        """Notes the norms of the states `[HV, K, V]` after `token` tokens, layer by layer."""
        norms = [state.flatten(1).norm(dim=-1) for state in recurrent]
        self._norms[token] = torch.stack(norms).float().cpu()

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.first + sum(len(part) for part in next(iter(self._decays.values()), []))

    def total(self) -> Tensor:
        """Sums of log decays from `first` to each token on, `[T + 1, L, HV]`."""
        parts = [torch.cat(parts).float().cpu() for parts in self._decays.values()]
        decay = torch.stack(parts, 1)
        return torch.cat((torch.zeros_like(decay[:1]), decay.cumsum(0)))

    def norms(self, tokens: Tensor) -> Tensor:
        """Norms of the states after each of `tokens` `[N]`, `[N, L, HV]`.

        Geometric means by distance between those noted; the nearest noted one outside of them.
        """
        known = torch.tensor(sorted(self._norms))
        values = torch.stack([self._norms[int(token)] for token in known]).clamp(min=1e-30).log()
        after = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
        before = (after - 1).clamp(min=0)
        span = (known[after] - known[before]).clamp(min=1)
        share = ((tokens - known[before]) / span).clamp(0, 1)[:, None, None]
        return torch.lerp(values[before], values[after], share).exp()


def tail_lengths(trace: DecayTrace, groups: Sequence[Sequence[int]], ends: Sequence[int]) -> Tensor:
    """Shortest tails within each budget, at some ends of a prefix.

    Args:
        trace: of a prefill.
        groups: places (0 to L - 1) of the linear layers of each replay group.
        ends: tokens at which a tail would end, within the trace.

    Returns:
        `[E, groups, budgets]` int64, in tokens; 0 where it would start before the trace does.

    Source: arXiv 2412.06464, equation 10: for unit keys and beta in [0, 2] a state's image has at
        most alpha times its norm. A later layer of a group has wrong inputs besides; it is
        given at least what those before it are off by.
    """
    if not ends:
        return torch.zeros(0, len(groups), len(BUDGETS), dtype=torch.int64)
    lengths = tried_lengths(max(ends) - trace.first)
    total, tried = trace.total(), torch.tensor(lengths, dtype=torch.int64)  # there may be none
    found = []
    for part in torch.split(torch.tensor(ends), _ENDS_AT_ONCE):
        error, there = _predicted(trace, total, part, tried)
        grouped = torch.stack([error[..., list(group)].amax(-1) for group in groups], -1)
        found.append(_shortest(grouped, there, part, tried, trace.first))
    return torch.cat(found)


def span_tails(
    trace: DecayTrace,
    groups: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    known: Tensor | None = None,
) -> Tensor:
    """Tails that will do wherever in a span they end.

    Args:
        trace: of a prefill.
        groups: as in `tail_lengths`.
        spans: [first, end) of tokens, such as pages; ends within the trace, and after its first.
        known: tails `[groups, budgets]` that end at the trace's first token, 0 = not known.

    Returns:
        `[spans, groups, budgets]` int64, in tokens, 0 = not known: the longest of the tails that
        end in [first, end]. A tail that would start before the trace does goes on with the known
        one: what that drops has only shrunk since.
    """
    ends = [_ends_in(max(first, trace.first), end) for first, end in spans]
    flat = [end for some in ends for end in some]
    tails = tail_lengths(trace, groups, flat)
    if known is not None:
        since = (torch.tensor(flat) - trace.first)[:, None, None]
        tails = torch.where((tails == 0) & (known > 0), since + known, tails)
    parts = torch.split(tails, [len(some) for some in ends])
    spanned = [torch.where((part > 0).all(0), part.amax(0), 0) for part in parts]
    return torch.stack(spanned) if spanned else tails


def _ends_in(first: int, end: int) -> list[int]:
    return [*range(first or _ENDS_APART, end, _ENDS_APART), end]


def tried_lengths(longest: int) -> list[int]:
    """Tail lengths that are tried: multiples of `SHORTEST_TAIL`, four an octave."""
    lengths, step = [], SHORTEST_TAIL
    length = step
    while length < longest:
        lengths.append(length)
        if length >= 2 * _STEPS_AN_OCTAVE * step:
            step *= 2
        length += step
    return lengths


def layer_error(lost: Tensor, whole: Tensor) -> Tensor:
    """Relative error of a layer's state `[..., L]`, from norms `[..., L, HV]` of its heads."""
    error: Tensor = lost.norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-30)
    return error


def _predicted(
    trace: DecayTrace, total: Tensor, ends: Tensor, tried: Tensor
) -> tuple[Tensor, Tensor]:
    """Relative error of each layer, `[E, S, L]`, and which tails lie in the trace, `[E, S]`."""
    starts = ends[:, None] - tried
    there = starts >= trace.first
    at = (starts - trace.first).clamp(min=0)
    shrunk = (total[ends - trace.first][:, None] - total[at]).exp()
    lost = shrunk * trace.norms(starts.flatten()).reshape(shrunk.shape)
    return layer_error(lost, trace.norms(ends)[:, None]), there


def _shortest(error: Tensor, there: Tensor, ends: Tensor, tried: Tensor, first: int) -> Tensor:
    """Lengths `[E, groups, budgets]` from errors `[E, S, groups]`."""
    within = (error[..., None] <= torch.tensor(BUDGETS)) & there[..., None, None]
    none = (ends if first == 0 else torch.zeros_like(ends))[:, None, None]
    if not len(tried):
        return none.expand(-1, error.shape[2], len(BUDGETS))
    return torch.where(within.any(1), tried[within.int().argmax(1)], none)
