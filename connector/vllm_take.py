"""What a step has computed, taken off this rank: rows and states, on their way to the store.

Worker's main thread only. Ranks take the same rows in the same step, since rank 0 puts their heads
together.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailreplay.connector.vllm_unstored import Unstored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.vllm_fill import Filling
    from tailreplay.connector.vllm_keep import Keeper
    from tailreplay.connector.vllm_meta import KeepBegin, KeepOp, LastState, StepOps
    from tailreplay.connector.vllm_model import VllmModel
    from tailreplay.connector.vllm_pool import RankPool
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)


class Taker:
    """Takes what is worth keeping. Nothing that fails here is the engine's concern.

    Args:
        model: this rank's view.
        codec: payloads of this rank's share.
        keeper: sends to the store; None on other ranks than 0.
        pool: this rank's GPU tier; None without one.
    """

    def __init__(
        self,
        model: VllmModel,
        codec: PayloadCodec,
        keeper: Keeper | None,
        pool: RankPool | None,
    ) -> None:
        self._model = model
        self._codec = codec
        self._keeper = keeper
        self._pool = pool
        self._unstored = Unstored() if keeper is None else keeper.unstored

    def take_failed(self) -> dict[str, int]:
        """Prompts that were not stored since the last call, by reason."""
        return self._unstored.take()

    def take(self, ops: StepOps, slot_mapping: Mapping[str, Tensor] | None) -> None:
        """Takes the rows and states of the step's forward; sends what is complete."""
        for request_id, tokens in ops.finished.items():
            self._finish(request_id, tokens, ops.last_states.get(request_id))
        if ops.keeps and slot_mapping:
            name = self._model.capture.attentions[0].layer_name
            lost = [keep.request_id for keep in ops.keeps]
            with self._unstored.guarded("rows were not taken", lambda: self._forget(*lost)):
                self._step(ops.keeps, slot_mapping[name])

    def boundary(self, filling: Filling) -> None:
        """Takes what a complete load has computed: the rows of its gap and the state at its end."""
        op = filling.load.op
        self._to_tier(lambda tier: tier.add_load(filling.load))
        lost = op.request_id
        if op.begin is not None:
            with self._unstored.guarded("a boundary was not taken", lambda: self._forget(lost)):
                self._boundary(op.begin, filling)

    def _boundary(self, begin: KeepBegin, filling: Filling) -> None:
        op, plan = filling.load.op, filling.load.op.plan
        self._begin(op.request_id, begin)
        if filling.rows:
            rows = torch.cat(filling.rows, 2)
            self._to_tier(lambda tier: tier.add_kv(op.request_id, filling.block, rows))
            whole = self._model.shard.gather_kv(rows)
            if self._keeper is not None and whole is not None:
                self._keeper.add_rows(op.request_id, filling.block, whole.cpu(), None)
        if plan.used_tokens not in begin.checkpoints:
            self._state(op.request_id, plan.used_tokens, filling.state_blocks)
            if self._keeper is not None:
                self._keeper.put(op.request_id)

    def _step(self, keeps: Sequence[KeepOp], slot_mapping: Tensor) -> None:
        """Finds each request's rows in the batch by the slot of the first one."""
        slots = slot_mapping.cpu().numpy()
        places = [int(np.flatnonzero(slots == k.slot)[0]) for k in keeps]
        total = max(at + k.rows for at, k in zip(places, keeps, strict=True))
        own = self._model.capture.kv_rows(total)
        hidden = None
        if self._model.capture.sources and (self._keeper is not None or self._pool is not None):
            hidden = self._model.capture.hidden_rows(total)
        for keep, at in zip(keeps, places, strict=True):
            if keep.begin is not None:
                self._begin(keep.request_id, keep.begin)
            self._to_tier(partial(_add_rows, keep, at, own, hidden))
            if keep.state_blocks is not None:
                self._state(keep.request_id, keep.first_token + keep.rows, keep.state_blocks)
        whole = self._model.shard.gather_kv(own)
        if self._keeper is not None and whole is not None:
            self._to_keeper(keeps, places, whole, hidden)

    def _to_tier(self, take: Callable[[RankPool], None]) -> None:
        """Gives the GPU tier something; it is given up where that fails.

        It fails on this rank alone, and the others wait for what this rank gives to rank 0.
        """
        if self._pool is not None:
            try:
                take(self._pool)
            except Exception:  # whatever it is, the engine does not need it
                logger.exception("nothing more is put into the GPU tier")
                self._pool = None

    def _to_keeper(
        self, keeps: Sequence[KeepOp], places: Sequence[int], kv: Tensor, hidden: Tensor | None
    ) -> None:
        assert self._keeper is not None
        hidden = None if hidden is None else hidden.cpu()
        for keep, at in zip(keeps, places, strict=True):
            own = None if hidden is None else part_of(hidden, 1, at, keep.rows)
            rows = part_of(kv, 2, at, keep.rows)
            self._keeper.add_rows(keep.request_id, keep.first_token, rows, own)
            if keep.put:
                self._keeper.put(keep.request_id)

    def _finish(
        self, request_id: str, tokens: ExtendedTokens | None, last: LastState | None
    ) -> None:
        """Takes the state at the end of an answer, sends what is left, and lets the rest go."""
        with self._unstored.guarded("the end of an answer was not taken"):
            if tokens is not None:
                self._to_tier(lambda tier: tier.grown(request_id, tokens))
            if last is not None:
                self._state(request_id, last.tokens, last.blocks)
            if self._keeper is not None and tokens is not None:
                self._keeper.put(request_id, tokens)
        self._forget(request_id)

    def _state(self, request_id: str, tokens: int, blocks: Sequence[int]) -> None:
        """All ranks call it: each gives its heads' part of the state."""
        rows = self._codec.checkpoint_rows(self._model.read_states(blocks))
        self._to_tier(lambda tier: tier.add_state(request_id, tokens, rows))
        local = self._model.local
        whole = self._model.shard.gather_units(
            rows.view(len(local.linear_layers), local.key_heads, -1)
        )
        if self._keeper is not None and whole is not None:
            self._keeper.add_state(request_id, tokens, whole.cpu())

    def _begin(self, request_id: str, begin: KeepBegin) -> None:
        if self._keeper is not None:
            self._keeper.begin(request_id, begin)
        self._to_tier(lambda tier: tier.begin(request_id, begin.namespace, begin.tokens))

    def _forget(self, *request_ids: str) -> None:
        for request_id in request_ids:
            if self._keeper is not None:
                self._keeper.forget(request_id)
            if self._pool is not None:
                self._pool.forget(request_id)


def _add_rows(keep: KeepOp, at: int, kv: Tensor, hidden: Tensor | None, tier: RankPool) -> None:
    """Gives the GPU tier a request's rows of a step."""
    tier.add_kv(keep.request_id, keep.first_token, kv.narrow(2, at, keep.rows))
    if hidden is not None:
        tier.add_hidden(keep.request_id, keep.first_token, hidden.narrow(1, at, keep.rows))


def part_of(rows: Tensor, dim: int, first: int, count: int) -> Tensor:
    """Rows of one request on the host; a copy, or they would keep the whole batch's alive."""
    if count == rows.shape[dim]:
        return rows.cpu()
    return rows.narrow(dim, first, count).to("cpu", copy=True)
