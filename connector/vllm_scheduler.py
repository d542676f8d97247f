"""The scheduler's side: follows each request, from its lookup over its load to its end.

Does no I/O on the scheduler's thread.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tailreplay.connector.vllm_config import settings_of
from tailreplay.connector.vllm_counts import Counts
from tailreplay.connector.vllm_local import LocalStates
from tailreplay.connector.vllm_lookup import Lookups, rest
from tailreplay.connector.vllm_meta import LOCAL, LoadOp, StepOps, WorkerNews, added_bytes
from tailreplay.connector.vllm_model import state_sizes
from tailreplay.connector.vllm_names import prompt_tokens
from tailreplay.connector.vllm_plan import Tracked, hit_plan, model_shape, report
from tailreplay.connector.vllm_worth import Worth

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


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
        # vLLM's own cache then says nothing about how exact its numbers are.
        caching = vllm_config.cache_config.enable_prefix_caching
        self._mixed = caching and not self._settings.strict
        self._shape = model_shape(vllm_config, self._settings.keeps_hiddens)
        self._ranks = vllm_config.parallel_config.world_size
        self._groups = kv_cache_config.kv_cache_groups
        logger.info(
            "store %s, mode %s, approximate numbers %s vLLM's own cache, outputs %sstored",
            self._settings.store,
            self._settings.mode,
            "may enter" if self._mixed else "stay out of",
            "" if self._settings.store_outputs else "not ",
        )
        self._lookups = Lookups(vllm_config, self._settings)
        self._worth = Worth(self._groups, self._settings)
        self._counts = Counts()
        # Requests by id, what the next step is to be told, and ranks that have answered by id.
        self._tracked: dict[str, Tracked] = {}
        self._next = StepOps()
        self._fetched: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self._locals: LocalStates | None = None
        # Whether the last step ran anything, or the next one will.
        self._is_busy = False

    def on_new_request(self, request: Any) -> None:
        """Asks the store, so that the answer is there when the request is first scheduled."""
        self._track(request)

    def bind(self, kv_cache_manager: Any) -> None:
        """Takes vLLM's cache manager, in which states that vLLM has cached itself are found."""
        self._locals = LocalStates(kv_cache_manager, state_sizes(self._groups))

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
            if self._clock() - tracked.asked_s < self._lookups.patience_s(busy=self._is_busy):
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
        self._is_busy = True
        self._counts.answered(tracked, extra)
        if extra == 0 or tracked.plan is None:
            return
        asked = tracked.asked.result()
        tracked.state = "loading"
        begin = self._worth.begin(tracked) if tracked.exact else None
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
        ops.keeps.extend(self._worth.of_step(self._tracked, scheduler_output))
        ops.idle = not scheduler_output.total_num_scheduled_tokens
        self._is_busy = not ops.idle
        if ops.idle:
            rest([tracked.asked for tracked in self._tracked.values()])
        return ops

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
                self._counts.load_failed(tracked.failed)
                tracked.plan, tracked.begun = None, False

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
        held = tracked.begun and self._keep_end(tracked, block_ids)
        wants = (request.kv_transfer_params or {}).get("tailreplay") is not None
        return held, {"tailreplay": report(tracked)} if wants else None

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by the names of `vllm_metrics`."""
        return self._counts.take()

    def close(self) -> None:
        """Lets running lookups end, each within its deadline, then gives the connection back."""
        self._lookups.close()

    def _track(self, request: Any) -> Tracked:
        before = self._tracked.get(request.request_id)
        policy = self._lookups.policy(request)
        tokens = prompt_tokens(request)
        asked = self._lookups.ask(request, tokens, policy)
        tracked = Tracked(request, tokens, policy, asked, request.num_preemptions, self._clock())
        if before is not None:
            tracked.begun, tracked.failed = before.begun, before.failed
        self._tracked[request.request_id] = tracked
        return tracked

    def _hold_local(self, tracked: Tracked) -> tuple[int, ...] | None:
        """Pins vLLM's own state where the load begins with it, and says in which blocks it is."""
        checkpoint = None if tracked.plan is None else tracked.plan.checkpoint
        if checkpoint is None or checkpoint.prefix_hash != LOCAL:
            return None
        assert self._locals is not None
        assert tracked.local is not None
        held = self._locals.hold(tracked.request.request_id, tracked.local)
        return tracked.local.block_ids if held else None

    def _keep_end(self, tracked: Tracked, block_ids: tuple[list[int], ...]) -> bool:
        """Tells the next step what a request leaves; whether some of it is still in its blocks."""
        request_id = tracked.request.request_id
        tokens = self._worth.final_tokens(tracked)
        self._next.finished[request_id] = tokens
        if tokens is None:
            return False
        last = self._worth.last_state(tracked, len(tokens), block_ids)
        if last is not None:
            self._next.last_states[request_id] = last
        return last is not None

    def _release(self, request_id: str) -> None:
        if self._locals is not None:
            self._locals.release(request_id)

    def _add_up(self, news: WorkerNews) -> None:
        for into, counts in ((self._fetched, news.fetched), (self._broken, news.failed)):
            for request_id, count in counts.items():
                if request_id in self._tracked:
                    into[request_id] = into.get(request_id, 0) + count
        for request_id, reason in news.reasons.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.failed = reason
        for request_id, loaded in news.loaded.items():
            self._counts.loaded(loaded)
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.loaded = added_bytes(tracked.loaded, loaded)
        self._counts.not_stored(news.failed_puts)

    def _answers(self) -> list[tuple[str, int]]:
        names = {**self._fetched, **self._broken}
        return [(r, self._fetched.get(r, 0) + self._broken.get(r, 0)) for r in names]
