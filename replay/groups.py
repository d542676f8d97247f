"""Which linear layers can be rebuilt from which stored hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINEAR = "linear_attention"
"""Transformers' name of a Gated DeltaNet layer."""

FULL = "full_attention"
"""Transformers' name of a full-attention (FA) layer."""


@dataclass(frozen=True, slots=True)
class ReplayGroup:
    """A source and the linear layers that it feeds, with no FA layer between them.

    Attributes:
        source: index of the FA layer whose output hidden is the group's input; None = the token
            embeddings (the leading group, which needs token ids only).
        linear_layers: indices of the linear layers, ascending and consecutive, at least one.
    """

    source: int | None
    linear_layers: tuple[int, ...]


def replay_groups(layer_types: Sequence[str]) -> tuple[ReplayGroup, ...]:
    """Split a model's layers into replay groups.

    An FA layer that is followed by another FA layer, or by none, feeds no group: in LLLF models
    the hiddens of one FA layer less than there are have to be stored.

    Args:
        layer_types: one name per layer, `linear_attention` or `full_attention`.

    Returns:
        The groups in layer order; together they hold each linear layer once.

    Raises:
        ValueError: a name is neither of the two, or no layer is linear.

    Source: Tail-Replay, arXiv 2608.30310 (FA output hiddens restart the layers that follow).
    """
    groups: list[ReplayGroup] = []
    source: int | None = None
    run: list[int] = []
    for layer, name in enumerate(layer_types):
        if name == LINEAR:
            run.append(layer)
        elif name == FULL:
            groups.extend(_group(source, run))
            source, run = layer, []
        else:
            raise ValueError(f"layer {layer} has type {name!r}, wanted {LINEAR!r} or {FULL!r}")
    groups.extend(_group(source, run))
    if not groups:
        raise ValueError(f"none of {len(layer_types)} layers is {LINEAR!r}, wanted at least one")
    return tuple(groups)


def _group(source: int | None, run: Sequence[int]) -> list[ReplayGroup]:
    return [ReplayGroup(source, tuple(run))] if run else []
