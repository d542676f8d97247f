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

_SQUARED = torch.tensor([budget**2 for budget in BUDGETS])
_UNKNOWN = 1 << 62
"""In place of a length, longer than any."""

_NOTHING = -80.0
"""Logarithm of what is as good as nothing; numbers below the normal ones are slow to work with."""

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

    def log_norms(self, tokens: Tensor) -> Tensor:
        """Logarithms of the norms of the states after each of `tokens` `[N]`, `[N, L, HV]`.

        Means by distance between those noted; the nearest noted one outside of them.
        """
        known = torch.tensor(sorted(self._norms))
        values = torch.stack([self._norms[int(token)] for token in known]).clamp(min=1e-30).log()
        if len(known) == 1:
            return values.expand(len(tokens), -1, -1)
        after = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
        before = (after - 1).clamp(min=0)
        span = (known[after] - known[before]).clamp(min=1)
        share = ((tokens - known[before]) / span).clamp(0, 1)[:, None, None]
        return torch.lerp(values[before], values[after], share)


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
    tried = torch.tensor(lengths, dtype=torch.int64)  # there may be none
    left = _Left(trace)
    found = []
    for part in torch.split(torch.tensor(ends), _ENDS_AT_ONCE):
        starts = part[:, None] - tried
        error = left.squared(starts, part)
        grouped = torch.stack([error[..., list(group)].amax(-1) for group in groups], -1)
        within = (grouped[..., None] <= _SQUARED) & (starts >= trace.first)[..., None, None]
        none = part if trace.first == 0 else torch.zeros_like(part)
        found.append(_shortest(within, tried, none))
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
    in_span = [_ends_in(max(first, trace.first), end) for first, end in spans]
    ends = sorted({end for some in in_span for end in some})  # neighbours share one
    tails = tail_lengths(trace, groups, ends)
    if known is not None:
        since = (torch.tensor(ends) - trace.first)[:, None, None]
        tails = torch.where((tails == 0) & (known > 0), since + known, tails)
    tails = torch.where(tails == 0, _UNKNOWN, tails)
    place = {end: i for i, end in enumerate(ends)}
    spanned = [tails[place[some[0]] : place[some[-1]] + 1].amax(0) for some in in_span]
    longest = torch.stack(spanned) if spanned else tails
    return torch.where(longest == _UNKNOWN, 0, longest)


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


class _Left:
    """What is left at an end of a state that is dropped at a start: logarithms, by token.

    Args:
        trace: of a prefill.
    """

    def __init__(self, trace: DecayTrace) -> None:
        total = trace.total()
        norms = trace.log_norms(torch.arange(trace.first, trace.first + len(total)))
        self._first, self._total = trace.first, total
        # By start what is added to the decay up to an end; and the squared norm of whole states.
        self._dropped = norms - total
        self._whole = _summed((2 * norms).exp_()).clamp_(min=1e-30)

    def squared(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Squared relative error of each layer `[E, S, L]` for tails from `starts` `[E, S]` on.

        Of a start in front of the trace it is that of the trace's first token.
        """
        at, end = (starts - self._first).clamp_(min=0), (ends - self._first)[:, None]
        left = self._dropped[at]  # a copy
        left += self._total[end]
        return _summed(left.mul_(2).clamp_(min=_NOTHING).exp_()) / self._whole[end]


def _summed(heads: Tensor) -> Tensor:
    """Sums over heads, `[..., L]` from `[..., L, HV]`; many short sums are slow one by one."""
    return heads @ torch.ones(heads.shape[-1])


def _shortest(within: Tensor, tried: Tensor, none: Tensor) -> Tensor:
    """Lengths `[E, groups, budgets]`: the first that is `within` `[E, S, ...]`, else `none` `[E]`.

    Lengths that are tried rise.
    """
    if not len(tried):
        return none[:, None, None].expand(-1, *within.shape[2:])
    shortest = torch.where(within, tried[:, None, None], _UNKNOWN).amin(1)
    return torch.where(shortest == _UNKNOWN, none[:, None, None], shortest)
