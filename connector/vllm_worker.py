"""The worker's side: begins to fetch what a step names, and says what has become of it.

Everything here runs on the worker's main thread except what `RankLoad` starts. With tensor
parallelism every rank does the same in the same step, because the scheduler's side says when.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from tailreplay.connector.client import StoreClient
from tailreplay.connector.device_pool import DevicePool
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.vllm_config import settings_of
from tailreplay.connector.vllm_fill import Filler
from tailreplay.connector.vllm_keep import Keeper
from tailreplay.connector.vllm_load import RankLoad
from tailreplay.connector.vllm_meta import IDLE_S, StepOps, WorkerNews
from tailreplay.connector.vllm_model import Shard, VllmModel
from tailreplay.connector.vllm_pool import RankPool
from tailreplay.connector.vllm_take import Taker
from tailreplay.store.namespace import tenant_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tailreplay.connector.vllm_capture import Capture
    from tailreplay.connector.vllm_fill import Filling

logger = logging.getLogger(__name__)


class WorkerSide:
    """One rank's connector.

    Args:
        vllm_config: the engine's config.
        kv_cache_config: vLLM's kv-cache groups.
        capture: the model's capture buffers.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, capture: Capture) -> None:
        self._settings = settings_of(vllm_config)
        shard = _shard(vllm_config)
        self._model = VllmModel(capture, vllm_config, kv_cache_config, shard)
        self._whole = PayloadCodec(self._model.whole)
        local = PayloadCodec(self._model.local)
        self._client = StoreClient(
            self._settings.store,
            match_timeout_s=self._settings.match_timeout_s,
            credentials=self._settings.credentials,
        )
        self._keeper = self._new_keeper() if shard.rank == 0 else None
        self._pool = self._new_pool(vllm_config)
        self._taker = Taker(self._model, local, self._keeper, self._pool)
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._filler = Filler(self._model, local, min(self._settings.max_step_tokens, step_tokens))
        # Loads by request until they are reported.
        self._loads: dict[str, RankLoad] = {}
        # What fetching threads have to say; appended by them, taken by the main thread.
        self._over: deque[tuple[str, str | None]] = deque()
        self._news = threading.Event()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        # Finished requests whose blocks nobody needs any more.
        self._released: set[str] = set()

    def start_loads(self, ops: StepOps) -> None:
        """Begins to fetch what the step names."""
        for op in ops.loads:
            load = RankLoad(
                op,
                self._model.whole,
                self._model.local,
                self._model.shard.first_kv_head,
                self._model.shard.rank,
                None if self._pool is None else self._pool.pool,
            )
            self._loads[op.request_id] = load
            if op.starts_locally and op.local_state is None:
                self._arrived(op.request_id, "evicted")
                continue
            load.start(
                self._client,
                self._whole.geometry,
                self._settings.stall_timeout_s,
                self._arrived,
            )

    def keep(self, ops: StepOps, slot_mapping: Mapping[str, Tensor] | None) -> None:
        """Keeps the rows and states of the step's forward; sends what is complete."""
        self._taker.take(ops, slot_mapping)
        self._released |= ops.last_states.keys()

    def fill(self, ops: StepOps) -> None:
        """Puts what has been fetched into the cache and goes on with gaps, within a budget."""
        for request_id, failed in ops.dropped.items():
            self._drop(request_id, failed)
        try:
            for request_id in ops.ready:
                self._filler.install(self._loads[request_id])
            complete = self._filler.run_gaps()
        except Exception:  # whatever it is, the engine can still prefill
            logger.exception("loads are given up, prefill instead")
            for request_id in {*ops.ready, *self._filler.give_up()}:
                self._drop(request_id, True)
            complete = []
        for filling in complete:
            self._complete(filling)
        if not ops.idle:
            self._filler.restore_adapters()
        if ops.idle and self._loads and not self._filler and not self._done:
            # vLLM would step again at once, and keep the interpreter from the fetching threads.
            self._news.wait(IDLE_S)
            self._news.clear()

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose load is over, those among them that failed, and those let go of."""
        found = self._done, self._failed, self._released
        self._done, self._failed, self._released = set(), set(), set()
        return found

    def take_news(self) -> WorkerNews | None:
        """What this rank tells the scheduler's side."""
        news = WorkerNews()
        while self._over:
            request_id, reason = self._over.popleft()
            if (load := self._loads.get(request_id)) is None:
                continue
            news.loaded[request_id] = load.bytes_by_tier()
            if reason is None:
                news.fetched[request_id] = 1
            else:
                news.failed[request_id] = 1
                news.reasons[request_id] = reason
        news.failed_puts = self._taker.take_failed()
        return news or None

    def close(self) -> None:
        """Ends fetches, sends what is waiting, gives the connection back."""
        for load in self._loads.values():
            load.cancel()
        if self._keeper is not None:
            self._keeper.close()
        self._client.close()

    def _new_keeper(self) -> Keeper:
        tenant = tenant_digest(self._settings.tenant)
        return Keeper(self._client, self._whole, self._settings.put_timeout_s, tenant)

    def _new_pool(self, vllm_config: Any) -> RankPool | None:
        """The GPU tier, in the memory that was set aside with the model."""
        memory = getattr(self._model.inner, "tailreplay_pool", None)
        if memory is None:
            return None
        logger.info("GPU tier of %d bytes on %s", len(memory), memory.device)
        caching = vllm_config.cache_config.enable_prefix_caching
        return RankPool(DevicePool(memory), computed_kv=not caching)

    def _arrived(self, request_id: str, reason: str | None) -> None:
        """Called by a fetching thread."""
        self._over.append((request_id, reason))
        self._news.set()

    def _drop(self, request_id: str, failed: bool) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        load.cancel()
        self._filler.drop(request_id)
        self._done.add(request_id)
        if failed:
            self._failed.add(request_id)

    def _complete(self, filling: Filling) -> None:
        """Reports a load; the state at a boundary that was not stored is stored at once."""
        request_id = filling.load.op.request_id
        del self._loads[request_id]
        self._done.add(request_id)
        self._taker.boundary(filling)
        filling.load.release()


def _shard(vllm_config: Any) -> Shard:
    size = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if size == 1:
        return Shard(0, 1, heads)
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Shard(group.rank_in_group, size, heads, group)
