"""What the scheduler's side of the connector tells the workers in a step, and what they answer.

Both travel inside vLLM's own messages between its processes. vLLM logs what it was doing when an
engine fails, so tokens and names are left out of their representations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.store.tokens import ExtendedTokens

LoadedBytes = dict[str, dict[str, int]]
"""Bytes by tier and kind."""

IDLE_S = 0.005
"""Longest wait in a step that runs no forward, seconds."""

LOCAL = b"local"
"""In place of a state's name: the one that vLLM has cached itself."""

BlockIds = tuple[list[int], ...]
"""Block ids of a request, one list per kv-cache group."""


@dataclass(frozen=True, slots=True)
class KeepBegin:
    """A request whose rows are to be kept for the store.

    Attributes:
        namespace: 32 bytes.
        tokens: the prompt.
        stored_kv_tokens: tokens whose keys and values the store has already.
        stored_hidden: spans of tokens whose hiddens it has.
        checkpoints: tokens at which it has states.
    """

    namespace: bytes = field(repr=False)
    tokens: ExtendedTokens = field(repr=False)
    stored_kv_tokens: int
    stored_hidden: tuple[tuple[int, int], ...]
    checkpoints: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOp:
    """A prefix to load.

    Attributes:
        request_id: vLLM's.
        namespace: 32 bytes.
        leaf: names the path in the store.
        tokens: the prompt.
        plan: boundary, state to start from, what to compute; without ranges.
        local_tokens: tokens that vLLM has cached itself; block-aligned.
        block_ids: where to put what is loaded.
        local_state: block per kv-cache group (-1 for FA groups) with vLLM's own state, where the
            gap begins there; None then means that it is gone.
        adapter: the request's LoRARequest; None without one.
        begin: how the request's rows are kept; None where they are not.
    """

    request_id: str
    namespace: bytes = field(repr=False)
    leaf: bytes = field(repr=False)
    tokens: ExtendedTokens = field(repr=False)
    plan: FetchPlan
    local_tokens: int
    block_ids: BlockIds
    local_state: tuple[int, ...] | None
    adapter: Any = field(repr=False)
    begin: KeepBegin | None

    @property
    def starts_locally(self) -> bool:
        """Whether the gap begins at vLLM's own state."""
        checkpoint = self.plan.checkpoint
        return checkpoint is not None and checkpoint.prefix_hash == LOCAL


@dataclass(frozen=True, slots=True)
class LastState:
    """The state at the end of an answer; its blocks are held until every rank has copied it.

    Attributes:
        tokens: how many it has seen.
        blocks: block per kv-cache group that holds it (-1 for FA groups).
    """

    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepOp:
    """Rows that this step computes.

    Attributes:
        request_id: vLLM's.
        first_token: position of the first row.
        rows: how many.
        slot: slot of the first row in the first FA group, by which its place in the batch is found.
        begin: set with a request's first rows, where no load has said it.
        state_blocks: block per kv-cache group that holds the state after the last row, where the
            state is worth keeping (-1 for FA groups); else None.
        put: whether the prompt is complete with these rows.
    """

    request_id: str
    first_token: int
    rows: int
    slot: int
    begin: KeepBegin | None
    state_blocks: tuple[int, ...] | None
    put: bool


@dataclass(slots=True)
class StepOps:
    """The connector metadata of one engine step.

    Attributes:
        loads: to be fetched from now on.
        ready: requests whose bytes every rank has; all ranks put them into the cache in this step.
        dropped: requests whose load is over, by failure (True) or abort (False).
        keeps: rows to keep, in any order.
        finished: requests that will have no more rows, with all their tokens; None = forget them.
        last_states: states of finished requests that are kept.
        idle: whether the step runs no forward, so that waiting a little costs nobody anything.
    """

    loads: list[LoadOp] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    dropped: dict[str, bool] = field(default_factory=dict)
    keeps: list[KeepOp] = field(default_factory=list)
    finished: dict[str, ExtendedTokens | None] = field(default_factory=dict, repr=False)
    last_states: dict[str, LastState] = field(default_factory=dict)
    idle: bool = False


@dataclass(slots=True)
class WorkerNews:
    """What workers have to say after a step.

    Attributes:
        fetched: ranks whose bytes are in, by request.
        failed: ranks whose load failed, by request.
        reasons: why, by request.
        loaded: bytes that have come, by request, tier ('gpu', 'cpu', 'redis') and kind.
        failed_puts: prompts that were not stored, by reason.
    """

    fetched: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, LoadedBytes] = field(default_factory=dict)
    failed_puts: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.fetched or self.failed or self.failed_puts)

    def aggregate(self, other: WorkerNews) -> WorkerNews:
        """Adds up two ranks' news; called by vLLM."""
        return WorkerNews(
            _added(self.fetched, other.fetched),
            _added(self.failed, other.failed),
            {**other.reasons, **self.reasons},
            {
                name: added_bytes(self.loaded.get(name, {}), other.loaded.get(name, {}))
                for name in {**self.loaded, **other.loaded}
            },
            _added(self.failed_puts, other.failed_puts),
        )


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


def added_bytes(a: LoadedBytes, b: LoadedBytes) -> LoadedBytes:
    """Both together."""
    return {tier: _added(a.get(tier, {}), b.get(tier, {})) for tier in {**a, **b}}
