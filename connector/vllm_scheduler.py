"""The scheduler's side: decides what is loaded and kept. Does no I/O on the scheduler's thread."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tailreplay.connector.client import StoreClient
from tailreplay.connector.stored import NOTHING, stored_prefix
from tailreplay.connector.vllm_config import APPROXIMATE, settings_of
from tailreplay.connector.vllm_local import LocalStates
from tailreplay.connector.vllm_meta import (
    IDLE_S,
    LOCAL,
    KeepBegin,
    KeepOp,
    LastState,
    LoadOp,
    StepOps,
    WorkerNews,
)
from tailreplay.connector.vllm_model import state_blocks, state_sizes
from tailreplay.connector.vllm_names import Namespaces, prompt_tokens
from tailreplay.connector.vllm_plan import Asked, Tracked, hit_plan, model_shape, report
from tailreplay.store.errors import TailReplayError
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.connector.policy import CachePolicy, Mode
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)

_MATCH_THREADS = 4


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
        self._shape = model_shape(vllm_config, self._settings.keeps_hiddens)
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
            self._settings.store,
            match_timeout_s=self._settings.match_timeout_s,
            credentials=self._settings.credentials,
        )
        self._threads = ThreadPoolExecutor(_MATCH_THREADS, thread_name_prefix="tailreplay-match")
        self._threads.submit(self._greet)
        # Requests by id, what the next step is to be told, and ranks that have answered by id.
        self._tracked: dict[str, Tracked] = {}
        self._next = StepOps()
        self._fetched: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._locals: LocalStates | None = None

    def _greet(self) -> None:
        """Connects, so that the first lookup need not; runs on a thread."""
        if not self._client.connect(self._settings.match_timeout_s):
            logger.warning(
                "the store at %s does not answer yet: prompts are prefilled until it does",
                self._settings.store,
            )

    def on_new_request(self, request: Any) -> None:
        """Asks the store, so that the answer is there when the request is first scheduled."""
        self._track(request)

    def bind(self, kv_cache_manager: Any) -> None:
        """Takes vLLM's cache manager, in which states that vLLM has cached itself are found."""
        self._locals = LocalStates(kv_cache_manager, self._state_sizes)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_tokens` that can be loaded; (None, False) = ask again.

        Called again for every attempt to schedule the request, and after a preemption.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.attempt != request.num_preemptions:
            tracked = self._track(request)
        tracked.queried_tokens = request.num_tokens - local_tokens
        tracked.local_tokens, tracked.local = local_tokens, None
        tracked.tainted = self._mixed and local_tokens > 0
        if request.skip_reading_prefix_cache:  # all its logits are wanted, or its hiddens
            tracked.failed = "not_read"
        if tracked.policy.mode == "off" or tracked.failed is not None:
            return 0, False
        if not tracked.asked.done():
            if self._clock() - tracked.asked_s < self._settings.match_timeout_s:
                return None, False
            tracked.failed = "deadline"
            return 0, False
        if local_tokens and self._locals is not None:
            tracked.local = self._locals.find(request, local_tokens)
        tracked.plan = hit_plan(tracked, self._shape)
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
        begin = self._begin(tracked) if tracked.exact else None
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
                self._hold_local(tracked),
                request.lora_request,
                begin,
            )
        )

    def _hold_local(self, tracked: Tracked) -> tuple[int, ...] | None:
        """Pins vLLM's own state where the load begins with it, and says in which blocks it is."""
        checkpoint = None if tracked.plan is None else tracked.plan.checkpoint
        if checkpoint is None or checkpoint.prefix_hash != LOCAL:
            return None
        assert self._locals is not None
        assert tracked.local is not None
        held = self._locals.hold(tracked.request.request_id, tracked.local)
        return tracked.local.block_ids if held else None

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
            self._release(request_id)
            if request_id in failed:
                tracked.failed = tracked.failed or "evicted"
                self._counts[f"failed_loads:{tracked.failed}"] += 1
                tracked.plan, tracked.begun = None, False

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by the names of `vllm_metrics`."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def _count_answer(self, tracked: Tracked, extra: int) -> None:
        """Counts where vLLM does: once an answer has led to blocks, preempted requests left out."""
        if not tracked.queried_tokens:
            return
        queried, tracked.queried_tokens = tracked.queried_tokens, 0
        self._count_lookup(tracked)
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

    def _count_lookup(self, tracked: Tracked) -> None:
        if tracked.policy.mode == "off" or tracked.lookup_counted:
            return
        tracked.lookup_counted = True
        late = tracked.failed == "deadline" or not tracked.asked.done()
        failed = "deadline" if late else tracked.asked.result().reason
        self._counts["lookups"] += 1
        self._counts["store_up"] = int(failed is None)
        if failed is not None:
            self._counts[f"failed_lookups:{failed}"] += 1

    def _add_up(self, news: WorkerNews) -> None:
        for into, counts in ((self._fetched, news.fetched), (self._broken, news.failed)):
            for request_id, count in counts.items():
                if request_id in self._tracked:
                    into[request_id] = into.get(request_id, 0) + count
        for request_id, reason in news.reasons.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.failed = reason

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over.

        Returns:
            Whether its blocks are to be held until the workers let go of them, and its report if
            it asked for one.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._release(request.request_id)
        self._fetched.pop(request.request_id, None)
        self._broken.pop(request.request_id, None)
        if tracked.state in ("loading", "filling"):
            # Its blocks are free only once every rank has let go of them.
            self._next.dropped[request.request_id] = False
            self._next.ready = [r for r in self._next.ready if r != request.request_id]
        held = False
        if tracked.begun:
            tokens = self._final_tokens(tracked)
            self._next.finished[request.request_id] = tokens
            held = tokens is not None and self._keep_last_state(tracked, len(tokens), block_ids)
        wants = (request.kv_transfer_params or {}).get("tailreplay") is not None
        return held, {"tailreplay": report(tracked)} if wants else None

    def _keep_last_state(
        self, tracked: Tracked, tokens: int, block_ids: tuple[list[int], ...]
    ) -> bool:
        """Has the state at the end of an answer kept, by the next step, if it is worth it.

        Not where a step is under way that runs one more token: the state is then no longer that
        of `tokens`.
        """
        answered = tokens - len(tracked.tokens)
        if (
            tracked.state in ("loading", "filling")
            or not tracked.exact
            or answered < self._settings.min_answer_tokens
            or tracked.request.num_in_flight_tokens
        ):
            return False
        blocks = state_blocks(block_ids, tokens, self._state_sizes)
        self._next.last_states[tracked.request.request_id] = LastState(tokens, blocks)
        return True

    def _release(self, request_id: str) -> None:
        if self._locals is not None:
            self._locals.release(request_id)

    def close(self) -> None:
        """Lets running lookups end, each within its deadline, then gives the connection back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _track(self, request: Any) -> Tracked:
        before = self._tracked.get(request.request_id)
        policy = self._policy(request)
        tokens = prompt_tokens(request)
        tracked = Tracked(
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

    def _ask(self, request: Any, tokens: ExtendedTokens, policy: CachePolicy) -> Asked:
        """Runs on a thread of its own. Never raises what a request would have to know of."""
        try:
            namespace = self._namespaces.of(request)
        except Exception:  # whatever it is, the request can be served without a cache
            logger.exception("a prompt has no name: it is prefilled, and not stored")
            return Asked(b"", NOTHING, "not_named")
        if policy.mode == "off":
            return Asked(namespace, NOTHING)
        try:
            answer = self._client.match(namespace, tokens)
        except TailReplayError as error:
            logger.debug("prefill instead: %s", error)
            return Asked(namespace, NOTHING, "store_down")
        return Asked(namespace, stored_prefix(answer))

    def _begin(self, tracked: Tracked) -> KeepBegin | None:
        if not tracked.asked.done() or tracked.policy.mode == "off":
            return None
        asked = tracked.asked.result()
        if not asked.namespace:
            return None
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

    def _keep(self, tracked: Tracked, first: int, rows: int, table: Any) -> KeepOp | None:
        prompt = len(tracked.tokens)
        if not tracked.exact or (first >= prompt and not self._settings.store_outputs):
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

    def _wants_state(self, tracked: Tracked, end: int) -> bool:
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

    def _final_tokens(self, tracked: Tracked) -> ExtendedTokens | None:
        """All tokens whose rows have been kept, where there are more than the prompt's."""
        request = tracked.request
        total = request.num_computed_tokens
        if not self._settings.store_outputs or total <= len(tracked.tokens):
            return None
        tokens = extended_tokens(request.all_token_ids[:total])
        tokens[: len(tracked.tokens)] = tracked.tokens
        return tokens
