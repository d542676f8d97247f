"""What the scheduler's side decides about a request's hit: pure, on top of `plan`."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tailreplay.connector.fetch_plan import FetchPlan, ModelShape
from tailreplay.connector.plan import plan_fetch
from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.connector.vllm_meta import LOCAL

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tailreplay.connector.policy import CachePolicy
    from tailreplay.connector.vllm_local import LocalState
    from tailreplay.connector.vllm_meta import LoadedBytes
    from tailreplay.store.tokens import ExtendedTokens


@dataclass(slots=True)
class Asked:
    """What a lookup, on its own thread, has found; no namespace = nothing may be stored."""

    namespace: bytes
    stored: StoredPrefix
    reason: str | None = None


@dataclass(slots=True)
class Tracked:
    """One request from its arrival to its end.

    Attributes:
        attempt: preemptions before the lookup; after one more it is asked again.
        asked_s: when the lookup was handed to its thread.
        local: the state at the end of vLLM's own hit, where the plan could begin with it.
        tainted: whether vLLM's own hit may be approximate.
        queried_tokens: tokens beyond vLLM's own hit, since the last answer that is not counted yet.
        state: 'waiting' until its blocks exist, 'loading' until every rank has the bytes,
            'filling' until it is reported, 'running'.
        failed: why no load is tried any more; None = nothing has failed.
        lookup_counted: whether the lookup is in the metrics.
        begun: whether its rows are being kept.
        last_state: token of the last state that was kept.
        loaded: bytes that its loads have brought, of all ranks.
    """

    request: Any
    tokens: ExtendedTokens
    policy: CachePolicy
    asked: Future[Asked]
    attempt: int
    asked_s: float
    plan: FetchPlan | None = None
    queried_tokens: int = 0
    local_tokens: int = 0
    local: LocalState | None = None
    tainted: bool = False
    state: str = "waiting"
    failed: str | None = None
    lookup_counted: bool = False
    begun: bool = False
    last_state: int = 0
    loaded: LoadedBytes = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether what is computed behind the hit is as exact as without one."""
        return not self.tainted and (self.plan is None or self.plan.exact)


def model_shape(vllm_config: Any, hiddens: bool) -> ModelShape:
    """What `plan` has to know of the model."""
    from tailreplay.replay.groups import FULL, replay_groups

    kinds = vllm_config.model_config.hf_text_config.layer_types
    sources = [g.source for g in replay_groups(kinds) if g.source is not None]
    return ModelShape(
        kinds.count(FULL),
        vllm_config.model_config.get_total_num_kv_heads(),
        len(sources) if hiddens else 0,
    )


def hit_plan(tracked: Tracked, shape: ModelShape) -> FetchPlan:
    """How a request's hit is used; a miss where vLLM gets further by going on from its own."""
    stored = tracked.asked.result().stored
    if tracked.local is not None:
        stored = _with_local(stored, tracked.local_tokens)
    plan = plan_fetch(stored, len(tracked.tokens), tracked.policy, shape)
    # Even a tail of all rows is not exact: stored hiddens are rounded sums.
    plan = replace(plan, exact=plan.exact and plan.replay_first is None)
    plan = _before_media(plan, tracked.request)
    return _beyond_local(plan, tracked.local_tokens) if tracked.local_tokens else plan


def _with_local(stored: StoredPrefix, local_tokens: int) -> StoredPrefix:
    """What is stored, with vLLM's own state among those to start from."""
    states = {c.token: c for c in stored.checkpoints}
    states[local_tokens] = StoredCheckpoint(local_tokens, LOCAL)
    return replace(stored, checkpoints=tuple(states[token] for token in sorted(states)))


def _beyond_local(plan: FetchPlan, local_tokens: int) -> FetchPlan:
    """The plan, or a miss if its gap begins before the end of vLLM's own hit.

    vLLM then gets further alone; that happens where its state there is not found any more.
    """
    if plan.used_tokens > local_tokens and plan.prefill_from >= local_tokens:
        return plan
    lost = {**plan.lost, "local": plan.used_tokens} if plan.used_tokens else plan.lost
    return FetchPlan("miss", True, plan.matched_tokens, lost=lost)


def _before_media(plan: FetchPlan, request: Any) -> FetchPlan:
    """A plan that runs no token of a medium or behind one: their inputs and positions are vLLM's.

    The boundary moves back to the first medium, or to the stored state where that is behind it.
    """
    media = min((f.mm_position.offset for f in request.mm_features or ()), default=None)
    computed = plan.recomputed_tokens or plan.replayed_tokens
    if media is None or plan.used_tokens <= media or not computed:
        return plan
    boundary = 0 if plan.replay_first is not None else max(plan.prefill_from, media)
    lost = {**plan.lost, "media": plan.used_tokens - boundary}
    if not boundary:
        return FetchPlan("miss", True, plan.matched_tokens, lost=lost)
    return replace(plan, used_tokens=boundary, lost=lost)


def report(tracked: Tracked) -> dict[str, Any]:
    """What became of a request's hit, in tokens."""
    plan = tracked.plan
    if plan is None:
        return {"mode": "miss", "miss_reason": tracked.failed, "matched_tokens": 0}
    reason = None
    if plan.mode == "miss":
        worst = max(plan.lost, key=plan.lost.__getitem__, default="not_stored")
        reason = tracked.asked.result().reason or worst
    return {
        "mode": plan.mode,
        "miss_reason": reason,
        "matched_tokens": plan.matched_tokens,
        "used_tokens": plan.used_tokens,
        "local_tokens": tracked.local_tokens,
        "replayed_tokens": plan.replayed_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "checkpoint_token": plan.checkpoint_token,
        "lost": dict(plan.lost),
        "bytes": tracked.loaded,
    }
