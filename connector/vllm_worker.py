"""The worker's side: fetches, fills vLLM's cache, closes gaps, and keeps what a step computed.

Everything here runs on the worker's main thread except what `RankLoad` starts. With tensor
parallelism every rank does the same in the same step, because the scheduler's side says when.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailreplay.connector.client import StoreClient
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.vllm_config import settings_of
from tailreplay.connector.vllm_keep import Keeper
from tailreplay.connector.vllm_load import RankLoad
from tailreplay.connector.vllm_meta import IDLE_S, StepOps, WorkerNews
from tailreplay.connector.vllm_model import Shard, VllmModel
from tailreplay.connector.vllm_prefill import Piece, Prefiller
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.connector.vllm_capture import Capture
    from tailreplay.connector.vllm_meta import KeepOp, LastState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Filling:
    """A load whose bytes are in the cache; `at` is the next token of its gap.

    `rows` are those of its last stored block, `[L, 2, t, H, d]`, in order.
    """

    load: RankLoad
    at: int
    state_blocks: tuple[int, ...]
    rows: list[Tensor] = field(default_factory=list)

    @property
    def no_past(self) -> int:
        """Token before which the states know nothing; 0 unless a tail starts from zero states."""
        return self.load.op.plan.replay_first or 0

    @property
    def block(self) -> int:
        """First token of the stored block in which the boundary lies."""
        return self.load.op.plan.used_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS


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
        self._local = PayloadCodec(self._model.local)
        self._prefiller = Prefiller(self._model)
        self._step_tokens = min(
            self._settings.max_step_tokens, vllm_config.scheduler_config.max_num_batched_tokens
        )
        self._client = StoreClient(
            self._settings.store,
            match_timeout_s=self._settings.match_timeout_s,
            credentials=self._settings.credentials,
        )
        self._keeper = (
            Keeper(
                self._client,
                self._whole,
                self._settings.put_timeout_s,
                tenant_digest(self._settings.tenant),
            )
            if shard.rank == 0
            else None
        )
        # Loads by request until they are reported, and those among them that fill the cache.
        self._loads: dict[str, RankLoad] = {}
        self._filling: dict[str, _Filling] = {}
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
        self._keep_last_states(ops.last_states)
        for request_id, tokens in ops.finished.items():
            if self._keeper is not None:
                if tokens is not None:
                    self._keeper.put(request_id, tokens)
                self._keeper.forget(request_id)
        if ops.keeps and slot_mapping:
            name = self._model.capture.attentions[0].layer_name
            try:
                self._keep_rows(ops.keeps, slot_mapping[name])
            except Exception:  # whatever it is, the engine does not need it
                logger.exception("rows of a step are not stored")
                for keep in ops.keeps:
                    self._forget(keep.request_id)

    def fill(self, ops: StepOps) -> None:
        """Puts what has been fetched into the cache and goes on with gaps, within a budget."""
        for request_id, failed in ops.dropped.items():
            self._drop(request_id, failed)
        try:
            for request_id in ops.ready:
                self._install(self._loads[request_id])
            self._close_gaps()
        except Exception:  # whatever it is, the engine can still prefill
            logger.exception("loads are given up, prefill instead")
            for request_id in {*ops.ready, *self._filling}:
                self._drop(request_id, True)
        if not ops.idle:
            self._prefiller.restore_adapters()
        if ops.idle and self._loads and not self._filling and not self._done:
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
            if request_id not in self._loads:
                continue
            if reason is None:
                news.fetched[request_id] = 1
            else:
                news.failed[request_id] = 1
                news.reasons[request_id] = reason
        return news if news.fetched or news.failed else None

    def close(self) -> None:
        """Ends fetches, sends what is waiting, gives the connection back."""
        for load in self._loads.values():
            load.cancel()
        if self._keeper is not None:
            self._keeper.close()
        self._client.close()

    def _arrived(self, request_id: str, reason: str | None) -> None:
        """Called by a fetching thread."""
        self._over.append((request_id, reason))
        self._news.set()

    def _forget(self, request_id: str) -> None:
        if self._keeper is not None:
            self._keeper.forget(request_id)

    def _drop(self, request_id: str, failed: bool) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        load.cancel()
        self._filling.pop(request_id, None)
        self._done.add(request_id)
        if failed:
            self._failed.add(request_id)

    def _install(self, load: RankLoad) -> None:
        """Writes keys, values and the state to start from; what follows is the gap."""
        op, plan = load.op, load.op.plan
        if plan.used_tokens % self._model.block_size(self._model.fa_gid[0]):
            self._model.clear_block(op.block_ids, plan.used_tokens)
        layers = [self._local.unpack_kv(self._rows(load, n)) for n in load.kv_numbers]
        skip = op.local_tokens - load.kv_first
        new = [(k[:, skip:], v[:, skip:]) for k, v in layers]
        if new and new[0][0].shape[1]:
            self._model.write_kv(op.block_ids, op.local_tokens, new)
        blocks = self._model.state_blocks(op.block_ids, plan.used_tokens)
        self._install_state(load, blocks)
        filling = _Filling(load, _compute_from(plan), blocks)
        self._filling[op.request_id] = filling
        if layers and op.begin is not None and filling.block < plan.prefill_from:
            tail = [torch.stack(pair)[:, :, filling.block - load.kv_first :] for pair in layers]
            filling.rows.append(torch.stack(tail).transpose(2, 3))

    def _install_state(self, load: RankLoad, blocks: tuple[int, ...]) -> None:
        checkpoint = load.op.plan.checkpoint
        if checkpoint is None:
            self._model.clear_states(blocks)
        elif load.op.local_state is not None:
            self._model.copy_states(load.op.local_state, blocks)
        else:
            units = np.concatenate([self._rows(load, n) for n in load.state_numbers])
            self._model.write_states(blocks, self._local.unpack_checkpoint(units))

    def _close_gaps(self) -> None:
        """Runs the next pieces of all gaps and tails; reports the loads that are complete."""
        for due in _by_adapter(self._due()):
            self._prefill([pair for pair in due if not pair[0].load.hidden_numbers])
            self._replay([pair for pair in due if pair[0].load.hidden_numbers])
        for request_id, filling in list(self._filling.items()):
            if filling.at == filling.load.op.plan.used_tokens:
                self._complete(request_id, filling)

    def _due(self) -> list[tuple[_Filling, Piece]]:
        """The next piece of each load that has one, first come first served, within the budget."""
        budget = self._step_tokens
        due: list[tuple[_Filling, Piece]] = []
        for filling in self._filling.values():
            op = filling.load.op
            end = min(op.plan.used_tokens, filling.at + budget)
            if end > filling.at:
                ids = [int(t) for t in op.tokens[filling.at : end]]
                past = filling.at - filling.no_past
                writes = filling.at >= op.plan.prefill_from
                blocks = filling.state_blocks
                piece = Piece(ids, filling.at, past, op.block_ids, blocks, writes, op.adapter)
                due.append((filling, piece))
                budget -= len(ids)
        return due

    def _prefill(self, due: Sequence[tuple[_Filling, Piece]]) -> None:
        if not due:
            return
        self._prefiller.run([piece for _, piece in due])
        rows = self._model.capture.kv_rows(sum(len(p.ids) for _, p in due))
        at = 0
        for filling, piece in due:
            self._gap_rows(filling, piece, rows[:, :, at : at + len(piece.ids)])
            filling.at = piece.end
            at += len(piece.ids)

    def _replay(self, due: Sequence[tuple[_Filling, Piece]]) -> None:
        if not due:
            return
        hidden = {}
        for number, source in enumerate(self._model.capture.sources):
            parts = []
            for filling, piece in due:
                rows = self._rows(filling.load, filling.load.hidden_numbers[number])
                first = piece.first - filling.no_past
                parts.append(self._local.unpack_hidden(rows)[first : first + len(piece.ids)])
            hidden[source] = torch.cat(parts)
        self._prefiller.replay([piece for _, piece in due], hidden)
        for filling, piece in due:
            filling.at = piece.end

    def _gap_rows(self, filling: _Filling, piece: Piece, rows: Tensor) -> None:
        """Keeps the rows of a gap that lie in the block that is stored next."""
        skip = max(0, filling.block - piece.first)
        if filling.load.op.begin is not None and skip < rows.shape[2]:
            filling.rows.append(rows[:, :, skip:])

    def _complete(self, request_id: str, filling: _Filling) -> None:
        """Reports a load; the state at a boundary that was not stored is stored at once."""
        del self._filling[request_id]
        del self._loads[request_id]
        self._done.add(request_id)
        op, plan = filling.load.op, filling.load.op.plan
        if op.begin is None:
            return
        if self._keeper is not None:
            self._keeper.begin(request_id, op.begin)
        if filling.rows:
            whole = self._model.shard.gather_kv(torch.cat(filling.rows, 2))
            if self._keeper is not None and whole is not None:
                self._keeper.add_rows(request_id, filling.block, whole.cpu(), None)
        if plan.used_tokens not in op.begin.checkpoints:
            self._keep_state(request_id, plan.used_tokens, filling.state_blocks)
            if self._keeper is not None:
                self._keeper.put(request_id)

    def _keep_rows(self, keeps: Sequence[KeepOp], slot_mapping: Tensor) -> None:
        """Finds each request's rows in the batch by the slot of the first one."""
        slots = slot_mapping.cpu().numpy()
        places = [int(np.flatnonzero(slots == k.slot)[0]) for k in keeps]
        total = max(at + k.rows for at, k in zip(places, keeps, strict=True))
        kv = self._model.shard.gather_kv(self._model.capture.kv_rows(total))
        hidden = None
        if self._keeper is not None and self._model.capture.sources:
            hidden = self._model.capture.hidden_rows(total).cpu()
        for keep, at in zip(keeps, places, strict=True):
            if self._keeper is not None and keep.begin is not None:
                self._keeper.begin(keep.request_id, keep.begin)
            if keep.state_blocks is not None:
                self._keep_state(keep.request_id, keep.first_token + keep.rows, keep.state_blocks)
            if self._keeper is None or kv is None:
                continue
            own = None if hidden is None else part_of(hidden, 1, at, keep.rows)
            rows = part_of(kv, 2, at, keep.rows)
            self._keeper.add_rows(keep.request_id, keep.first_token, rows, own)
            if keep.put:
                self._keeper.put(keep.request_id)

    def _keep_last_states(self, last_states: Mapping[str, LastState]) -> None:
        """Keeps the states at the ends of answers, and lets go of the requests' blocks."""
        for request_id, last in last_states.items():
            self._released.add(request_id)
            try:
                self._keep_state(request_id, last.tokens, last.blocks)
            except Exception:  # whatever it is, the engine does not need it
                logger.exception("a state is not stored")

    def _keep_state(self, request_id: str, tokens: int, blocks: Sequence[int]) -> None:
        """All ranks call it: each gives its heads' part of the state."""
        packed = self._local.pack_checkpoint(self._model.read_states(blocks))
        local = self._model.local
        units = torch.frombuffer(packed, dtype=torch.uint8)
        whole = self._model.shard.gather_units(
            units.view(len(local.linear_layers), local.key_heads, -1)
        )
        if self._keeper is not None and whole is not None:
            self._keeper.add_state(request_id, tokens, whole)

    def _rows(self, load: RankLoad, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert load.load is not None
        return load.load.buffers[number]


def _by_adapter(due: Sequence[tuple[_Filling, Piece]]) -> list[list[tuple[_Filling, Piece]]]:
    """Pieces of each adapter: vLLM has room for a few adapters in one forward."""
    groups: dict[int, list[tuple[_Filling, Piece]]] = {}
    for pair in due:
        adapter = pair[1].adapter
        groups.setdefault(0 if adapter is None else adapter.lora_int_id, []).append(pair)
    return list(groups.values())


def part_of(rows: Tensor, dim: int, first: int, count: int) -> Tensor:
    """Rows of one request on the host; a copy, or they would keep the whole batch's alive."""
    if count == rows.shape[dim]:
        return rows.cpu()
    return rows.narrow(dim, first, count).to("cpu", copy=True)


def _compute_from(plan: FetchPlan) -> int:
    """First token that is run; a tail is run whole, since its keys and values are there."""
    return plan.prefill_from if plan.replay_first is None else plan.replay_first


def _shard(vllm_config: Any) -> Shard:
    size = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if size == 1:
        return Shard(0, 1, heads)
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Shard(group.rank_in_group, size, heads, group)
