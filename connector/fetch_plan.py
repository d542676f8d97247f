"""How a hit is served, as a value: the plan, what it loads, and what planning knows of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix

UsedMode = Literal["exact", "tail", "zero", "off", "miss"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan must know of the model.

    Attributes:
        fa_layers: full-attention layers.
        kv_heads: KV heads of each.
        hidden_sources: FA layers whose hiddens are stored.
        tails_by_group: whether the engine replays a tail of its own length in each group.
        replays_tokens: whether it can run a tail's tokens against loaded keys and values, where
            hiddens are missing.
    """

    fa_layers: int
    kv_heads: int
    hidden_sources: int
    tails_by_group: bool = False
    replays_tokens: bool = False


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """How one prompt is served.

    Attributes:
        mode: what it amounts to.
        exact: whether states and logits equal full prefill within dtype noise.
        matched_tokens: m that could be had, at most the prompt's length - 1.
        used_tokens: boundary that is used; a gap that is prefilled again is part of it.
        prefill_from: first token that the model runs over; below `used_tokens` where the gap is
            prefilled again.
        checkpoint: state to start from; None = zero state.
        replay_first: first row to replay, up to `prefill_from`; None = no replay.
        replay_firsts: the same for each replay group, where they differ; else empty.
        from_tokens: whether those rows are tokens, for want of hiddens: the whole model runs over
            them and attends to the keys and values that are loaded.
        budget: relative error of the states that the tails were chosen for; None if for none.
        tail_wanted: the longest tail that the error figures ask for; None where they were not
            read, or are not known.
        ranges: what to load, in order.
        late_ranges: how many of them, at the end, nothing waits for before the first token.
        lost: tokens of the match that are not used, by reason.
    """

    mode: UsedMode
    exact: bool
    matched_tokens: int
    used_tokens: int = 0
    prefill_from: int = 0
    checkpoint: StoredCheckpoint | None = None
    replay_first: int | None = None
    replay_firsts: tuple[int, ...] = ()
    from_tokens: bool = False
    budget: float | None = None
    tail_wanted: int | None = None
    ranges: tuple[pb.Range, ...] = ()
    late_ranges: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)

    @property
    def checkpoint_token(self) -> int:
        """Tokens that the state to start from has seen."""
        return self.checkpoint.token if self.checkpoint is not None else 0

    @property
    def replayed_tokens(self) -> int:
        """Rows run to rebuild states; a mean over the groups."""
        if self.replay_first is None:
            return 0
        firsts = self.replay_firsts or (self.replay_first,)
        return self.prefill_from - sum(firsts) // len(firsts)

    @property
    def replay_from(self) -> Literal["hiddens", "tokens"] | None:
        """What those rows are; None where there are none."""
        if self.replay_first is None:
            return None
        return "tokens" if self.from_tokens else "hiddens"

    @property
    def recomputed_tokens(self) -> int:
        """Matched tokens that are prefilled again."""
        return self.used_tokens - self.prefill_from

    def ranges_of(self, kind: Kind) -> list[int]:
        """Numbers of the ranges of a kind, in order."""
        return [number for number, wanted in enumerate(self.ranges) if int(wanted.kind) == kind]


def with_ranges(plan: FetchPlan, stored: StoredPrefix, shape: ModelShape) -> FetchPlan:
    """Adds what to load: state, hiddens by source in replay order, then KV layer by layer.

    Last comes what only the write-back needs: the hiddens at the start of the page in which the
    model starts to compute, without which that page could not be stored.
    """
    ranges = [*state_ranges(plan), *hidden_ranges(plan, shape)]
    if plan.prefill_from:
        for layer in range(shape.fa_layers):
            first = layer * shape.kv_heads
            ranges.append(_range(Kind.KV, 0, plan.prefill_from, first=first, units=shape.kv_heads))
    page = plan.prefill_from // PAGE_TOKENS * PAGE_TOKENS
    late = 0
    if (
        plan.exact
        and page < plan.prefill_from
        and shape.hidden_sources
        and stored.has_hidden(page, plan.prefill_from)
        and (plan.replay_first is None or plan.replay_first > page)
    ):
        ranges.append(_range(Kind.HIDDEN, page, plan.prefill_from))
        late = 1
    return replace(plan, ranges=tuple(ranges), late_ranges=late)


def state_ranges(plan: FetchPlan) -> Iterator[pb.Range]:
    """The state to start from, if any."""
    if plan.checkpoint is not None:
        end, name = plan.checkpoint.token, plan.checkpoint.prefix_hash
        yield _range(Kind.CHECKPOINT, end - 1, end, prefix_hash=name)


def hidden_ranges(plan: FetchPlan, shape: ModelShape) -> Iterator[pb.Range]:
    """The hiddens to replay, source by source."""
    if plan.replay_first is None or plan.from_tokens:
        return
    one_first = (plan.replay_first,) * shape.hidden_sources
    firsts = plan.replay_firsts[-shape.hidden_sources :] or one_first
    for source in range(shape.hidden_sources):
        yield _range(Kind.HIDDEN, firsts[source], plan.prefill_from, first=source, units=1)


def _range(
    kind: Kind, start: int, end: int, *, first: int = 0, units: int = 0, prefix_hash: bytes = b""
) -> pb.Range:
    return pb.Range(
        kind=pb.Kind.ValueType(kind),
        first_token=start,
        end_token=end,
        first_unit=first,
        units=units,
        prefix_hash=prefix_hash,
    )
