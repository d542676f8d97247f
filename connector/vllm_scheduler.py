"""The scheduler's side: decides what is loaded and kept. Does no I/O on the scheduler's thread."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tailreplay.connector.client import StoreClient
from tailreplay.connector.plan import (
    NOTHING,
    FetchPlan,
    ModelShape,
    StoredPrefix,
    plan_fetch,
    stored_prefix,
)
from tailreplay.connector.vllm_config import APPROXIMATE, settings_of
from tailreplay.connector.vllm_meta import (
    IDLE_S,
    KeepBegin,
    KeepOp,
    LoadOp,
    StepOps,
    WorkerNews,
)
from tailreplay.connector.vllm_model import state_blocks, state_sizes
from tailreplay.connector.vllm_names import Namespaces, prompt_tokens
from tailreplay.store.errors import TailReplayError
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.connector.policy import CachePolicy, Mode
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)

_MATCH_THREADS = 4


@dataclass(slots=True)
class _Asked:
    """What a lookup, on its own thread, has found."""

    namespace: bytes
    stored: StoredPrefix
    reason: str | None = None


@dataclass(slots=True)
class _Tracked:
    """One request from its arrival to its end.

    Attributes:
        attempt: preemptions before the lookup; after one more it is asked again.
        asked_s: when the lookup was handed to its thread.
        queried_tokens: tokens beyond vLLM's own hit, since the last answer that is not counted yet.
        state: 'waiting' until its blocks exist, 'loading' until every rank has the bytes,
            'filling' until it is reported, 'running'.
        failed: why no load is tried any more; None = nothing has failed.
        begun: whether its rows are being kept.
        last_state: token of the last state that was kept.
    """

    request: Any
    tokens: ExtendedTokens
    policy: CachePolicy
    asked: Future[_Asked]
    attempt: int
    asked_s: float
    plan: FetchPlan | None = None
    queried_tokens: int = 0
    local_tokens: int = 0
    state: str = "waiting"
    failed: str | None = None
    begun: bool = False
    last_state: int = 0


class SchedulerSide:
    """The connector in vLLM's scheduler process; all calls come from its one thread.

    Args:
        vllm_config: the engine's config.
        kv_cache_config: vLLM's kv-cache groups.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings_of(vllm_config)
        self._clock = clock
        caching = vllm_config.cache_config.enable_prefix_caching
        self._strict = caching and self._settings.strict
        # vLLM's own cache then says nothing about how exact its numbers are.
        self._mixed = caching and not self._settings.strict
        self._namespaces = Namespaces(vllm_config, self._settings)
        self._shape = _shape(vllm_config, self._settings.keeps_hiddens)
        self._ranks = vllm_config.parallel_config.world_size
        self._state_sizes = state_sizes(kv_cache_config.kv_cache_groups)
        self._fa_gid = self._state_sizes.index(-1)
        self._fa_size = kv_cache_config.kv_cache_groups[self._fa_gid].kv_cache_spec.block_size
        logger.info(
            "store %s, mode %s, approximate numbers %s vLLM's own cache, outputs %sstored",
            self._settings.store,
            self._settings.mode,
            "may enter" if self._mixed else "stay out of",
            "" if self._settings.store_outputs else "not ",
        )
        self._client = StoreClient(
            self._settings.store, match_timeout_s=self._settings.match_timeout_s
        )
        self._threads = ThreadPoolExecutor(_MATCH_THREADS, thread_name_prefix="tailreplay-match")
        self._threads.submit(self._client.connect, self._settings.match_timeout_s)
        # Requests by id, what the next step is to be told, and ranks that have answered by id.
        self._tracked: dict[str, _Tracked] = {}
        self._next = StepOps()
        self._fetched: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def on_new_request(self, request: Any) -> None:
        """Asks the store, so that the answer is there when the request is first scheduled."""
        self._track(request)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_tokens` that can be loaded; (None, False) = ask again.

        Called again for every attempt to schedule the request, and after a preemption.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.attempt != request.num_preemptions:
            tracked = self._track(request)
        tracked.queried_tokens = request.num_tokens - local_tokens
        if tracked.policy.mode == "off" or tracked.failed is not None:
            return 0, False
        if not tracked.asked.done():
            if self._clock() - tracked.asked_s < self._settings.match_timeout_s:
                return None, False
            tracked.failed = "deadline"
            return 0, False
        tracked.plan = self._plan(tracked, local_tokens)
        tracked.local_tokens = local_tokens
        extra = tracked.plan.used_tokens - local_tokens
        return (extra, True) if extra > 0 else (0, False)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], extra: int) -> None:
        """Blocks exist: the load can begin."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self._count_answer(tracked, extra)
        if extra == 0 or tracked.plan is None:
            return
        asked = tracked.asked.result()
        tracked.state = "loading"
        begin = self._begin(tracked) if tracked.plan.exact else None
        tracked.begun = begin is not None
        self._next.loads.append(
            LoadOp(
                request.request_id,
                asked.namespace,
                asked.stored.leaf,
                tracked.tokens,
                replace(tracked.plan, ranges=(), late_ranges=0),
                tracked.local_tokens,
                tuple(list(ids) for ids in block_ids),
                begin,
            )
        )

    def step(self, scheduler_output: Any) -> StepOps:
        """What the workers are told with this step."""
        for request_id in [r for r, n in self._answers() if n == self._ranks]:
            tracked = self._tracked.get(request_id)
            fetched = self._fetched.pop(request_id, 0)
            self._broken.pop(request_id, 0)
            if tracked is None or tracked.state != "loading":
                continue
            tracked.state = "filling"
            if fetched == self._ranks:
                self._next.ready.append(request_id)
            else:
                self._next.dropped[request_id] = True
        ops, self._next = self._next, StepOps()
        self._add_keeps(ops, scheduler_output)
        ops.idle = not scheduler_output.total_num_scheduled_tokens
        if ops.idle:
            self._rest()
        return ops

    def _rest(self) -> None:
        """Gives the processor to the lookups, for a moment, when there is nothing else to run.

        vLLM would ask again at once, and again, and keep them from the interpreter.
        """
        waiting = [t.asked for t in self._tracked.values() if not t.asked.done()]
        if waiting:
            wait(waiting, IDLE_S, return_when=FIRST_COMPLETED)

    def heard(self, news: WorkerNews | None, finished: set[str], failed: set[str]) -> None:
        """Takes in what the workers report after a step."""
        if news is not None:
            self._add_up(news)
        for request_id in finished:
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            tracked.state = "running"
            if request_id in failed:
                tracked.failed = tracked.failed or "evicted"
                self._counts[f"failed_loads:{tracked.failed}"] += 1
                tracked.plan, tracked.begun = None, False

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by the names of `vllm_metrics`."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def _count_answer(self, tracked: _Tracked, extra: int) -> None:
        """Counts where vLLM does: once an answer has led to blocks, preempted requests left out."""
        if not tracked.queried_tokens:
            return
        queried, tracked.queried_tokens = tracked.queried_tokens, 0
        if extra:
            self._counts["loads"] += 1
        if tracked.request.num_preemptions:
            return
        self._counts["queried_tokens"] += queried
        self._counts["loaded_tokens"] += extra
        if tracked.plan is not None:
            self._counts["matched_tokens"] += tracked.plan.matched_tokens
            self._counts["used_tokens"] += tracked.plan.used_tokens
            for reason, tokens in tracked.plan.lost.items():
                self._counts[f"lost_tokens:{reason}"] += tokens

    def _add_up(self, news: WorkerNews) -> None:
        for into, counts in ((self._fetched, news.fetched), (self._broken, news.failed)):
            for request_id, count in counts.items():
                if request_id in self._tracked:
                    into[request_id] = into.get(request_id, 0) + count
        for request_id, reason in news.reasons.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.failed = reason

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request is over; returns its report if it asked for one."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        self._fetched.pop(request.request_id, None)
        self._broken.pop(request.request_id, None)
        if tracked.state in ("loading", "filling"):
            # Its blocks are free only once every rank has let go of them.
            self._next.dropped[request.request_id] = False
            self._next.ready = [r for r in self._next.ready if r != request.request_id]
        if tracked.begun:
            self._next.finished[request.request_id] = self._final_tokens(tracked)
        wants = (request.kv_transfer_params or {}).get("tailreplay") is not None
        return {"tailreplay": _report(tracked)} if wants else None

    def close(self) -> None:
        """Lets running lookups end, each within its deadline, then gives the connection back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _track(self, request: Any) -> _Tracked:
        before = self._tracked.get(request.request_id)
        policy = self._policy(request)
        tokens = prompt_tokens(request)
        tracked = _Tracked(
            request,
            tokens,
            policy,
            self._threads.submit(self._ask, request, tokens, policy),
            request.num_preemptions,
            self._clock(),
        )
        if before is not None:
            tracked.begun, tracked.failed = before.begun, before.failed
        self._tracked[request.request_id] = tracked
        return tracked

    def _policy(self, request: Any) -> CachePolicy:
        """The request's own mode where it names one that is allowed, else the engine's."""
        wanted = (request.kv_transfer_params or {}).get("tailreplay") or {}
        mode: Mode = wanted.get("mode", self._settings.mode)
        if self._strict and mode in APPROXIMATE:
            mode = "exact"
        try:
            return self._settings.policy(mode)
        except ValidationError:
            logger.debug("a request wants an unknown mode, the engine's is used")
            return self._settings.policy(self._settings.mode)

    def _ask(self, request: Any, tokens: ExtendedTokens, policy: CachePolicy) -> _Asked:
        """Runs on a thread of its own. Never raises what a request would have to know of."""
        namespace = self._namespaces.of(request)
        if policy.mode == "off":
            return _Asked(namespace, NOTHING)
        try:
            answer = self._client.match(namespace, tokens)
        except TailReplayError as error:
            logger.debug("prefill instead: %s", error)
            return _Asked(namespace, NOTHING, "store_down")
        return _Asked(namespace, stored_prefix(answer))

    def _plan(self, tracked: _Tracked, local_tokens: int) -> FetchPlan:
        """The plan; no load where vLLM gets further by going on from its own hit."""
        asked = tracked.asked.result()
        plan = plan_fetch(asked.stored, len(tracked.tokens), tracked.policy, self._shape)
        if local_tokens:
            plan = _beyond_local(plan, local_tokens)
        # Even a tail of all rows is not exact: stored hiddens are rounded sums.
        inexact = plan.replay_first is not None or (self._mixed and local_tokens > 0)
        plan = replace(plan, exact=plan.exact and not inexact)
        return _before_media(plan, tracked.request)

    def _begin(self, tracked: _Tracked) -> KeepBegin | None:
        if not tracked.asked.done() or tracked.policy.mode == "off":
            return None
        asked = tracked.asked.result()
        stored = asked.stored
        return KeepBegin(
            asked.namespace,
            tracked.tokens,
            min(stored.kv_tokens, stored.matched_tokens),
            stored.hidden,
            tuple(c.token for c in stored.checkpoints),
        )

    def _answers(self) -> list[tuple[str, int]]:
        names = {**self._fetched, **self._broken}
        return [(r, self._fetched.get(r, 0) + self._broken.get(r, 0)) for r in names]

    def _add_keeps(self, ops: StepOps, scheduler_output: Any) -> None:
        """Names the rows of this step that are worth keeping."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        table = scheduler_output.kv_connector_block_state
        for request_id, rows in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or request_id not in computed:
                continue
            keep = self._keep(tracked, computed[request_id], rows, table)
            if keep is not None:
                ops.keeps.append(keep)

    def _keep(self, tracked: _Tracked, first: int, rows: int, table: Any) -> KeepOp | None:
        prompt = len(tracked.tokens)
        exact = tracked.plan is None or tracked.plan.exact
        if not exact or (first >= prompt and not self._settings.store_outputs):
            return None
        begin = None
        if not tracked.begun:
            begin = self._begin(tracked)
            if begin is None or first >= prompt or begin.stored_kv_tokens < first:
                return None
            tracked.begun = True
        end = first + rows
        request_id = tracked.request.request_id
        block_ids = table.get_block_ids(request_id)
        block = block_ids[self._fa_gid][first // self._fa_size]
        keep_state = self._wants_state(tracked, end)
        return KeepOp(
            request_id,
            first,
            rows,
            block * self._fa_size + first % self._fa_size,
            begin,
            state_blocks(block_ids, end, self._state_sizes) if keep_state else None,
            put=first < prompt <= end,
        )

    def _wants_state(self, tracked: _Tracked, end: int) -> bool:
        """A state is kept at the prompt's end, and inside it where the last one is far."""
        prompt = len(tracked.tokens)
        if end > prompt:
            return False
        used = tracked.plan.used_tokens if tracked.plan is not None else 0
        last = max(tracked.last_state, used)
        if end < prompt and end - last < self._settings.checkpoint_tokens:
            return False
        tracked.last_state = end
        return True

    def _final_tokens(self, tracked: _Tracked) -> ExtendedTokens | None:
        """All tokens whose rows have been kept, where there are more than the prompt's."""
        request = tracked.request
        total = request.num_computed_tokens
        if not self._settings.store_outputs or total <= len(tracked.tokens):
            return None
        tokens = extended_tokens(request.all_token_ids[:total])
        tokens[: len(tracked.tokens)] = tracked.tokens
        return tokens


def _shape(vllm_config: Any, hiddens: bool) -> ModelShape:
    from tailreplay.replay.groups import FULL, replay_groups

    kinds = vllm_config.model_config.hf_text_config.layer_types
    sources = [g.source for g in replay_groups(kinds) if g.source is not None]
    return ModelShape(
        kinds.count(FULL),
        vllm_config.model_config.get_total_num_kv_heads(),
        len(sources) if hiddens else 0,
    )


def _beyond_local(plan: FetchPlan, local_tokens: int) -> FetchPlan:
    """The plan, or a miss if its gap begins before the end of vLLM's own hit.

    The state there can not be the start of a gap: vLLM leaves its block out of the table of a
    request that loads more, and hands it out again.
    """
    if plan.used_tokens > local_tokens and plan.prefill_from >= local_tokens:
        return plan
    lost = {**plan.lost, "local": plan.used_tokens} if plan.used_tokens else plan.lost
    return FetchPlan("miss", True, plan.matched_tokens, lost=lost)


def _before_media(plan: FetchPlan, request: Any) -> FetchPlan:
    """A plan that runs no token behind a medium: its positions and inputs are the engine's matter.

    The boundary moves back to where the stored state is.
    """
    media = min((f.mm_position.offset for f in request.mm_features or ()), default=None)
    computed = plan.recomputed_tokens or plan.replayed_tokens
    if media is None or plan.used_tokens <= media or not computed:
        return plan
    if plan.replay_first is not None or not plan.prefill_from:
        lost = plan.used_tokens
        return FetchPlan("miss", True, plan.matched_tokens, lost={**plan.lost, "media": lost})
    lost = plan.recomputed_tokens
    return replace(plan, used_tokens=plan.prefill_from, lost={**plan.lost, "media": lost})


def _report(tracked: _Tracked) -> dict[str, Any]:
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
    }
