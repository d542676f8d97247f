"""What a step has computed, taken off this rank: rows and states, on their way to the store.

Worker's main thread only. Ranks take the same rows in the same step, since rank 0 puts their heads
together.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.vllm_fill import Filling
    from tailreplay.connector.vllm_keep import Keeper
    from tailreplay.connector.vllm_meta import KeepBegin, KeepOp, LastState, StepOps
    from tailreplay.connector.vllm_model import VllmModel

logger = logging.getLogger(__name__)


class Taker:
    """Takes what is worth keeping. Nothing that fails here is the engine's concern.

    Args:
        model: this rank's view.
        codec: payloads of this rank's share.
        keeper: sends to the store; None on other ranks than 0.
    """

    def __init__(self, model: VllmModel, codec: PayloadCodec, keeper: Keeper | None) -> None:
        self._model = model
        self._codec = codec
        self._keeper = keeper

    def take(self, ops: StepOps, slot_mapping: Mapping[str, Tensor] | None) -> None:
        """Takes the rows and states of the step's forward; sends what is complete."""
        for request_id, last in ops.last_states.items():
            self._last_state(request_id, last)
        for request_id, tokens in ops.finished.items():
            if self._keeper is not None:
                if tokens is not None:
                    self._keeper.put(request_id, tokens)
                self._keeper.forget(request_id)
        if ops.keeps and slot_mapping:
            name = self._model.capture.attentions[0].layer_name
            try:
                self._step(ops.keeps, slot_mapping[name])
            except Exception:  # whatever it is, the engine does not need it
                logger.exception("rows of a step are not stored")
                for keep in ops.keeps:
                    self._forget(keep.request_id)

    def boundary(self, filling: Filling) -> None:
        """Takes what a complete load has computed: the rows of its gap and the state at its end."""
        op = filling.load.op
        try:
            if op.begin is not None:
                self._boundary(op.begin, filling)
        except Exception:  # whatever it is, the engine does not need it
            logger.exception("a boundary is not stored")
            self._forget(op.request_id)

    def _boundary(self, begin: KeepBegin, filling: Filling) -> None:
        op, plan = filling.load.op, filling.load.op.plan
        self._begin(op.request_id, begin)
        if filling.rows:
            whole = self._model.shard.gather_kv(torch.cat(filling.rows, 2))
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
        kv = self._model.shard.gather_kv(self._model.capture.kv_rows(total))
        hidden = None
        if self._keeper is not None and self._model.capture.sources:
            hidden = self._model.capture.hidden_rows(total).cpu()
        for keep, at in zip(keeps, places, strict=True):
            if keep.begin is not None:
                self._begin(keep.request_id, keep.begin)
            if keep.state_blocks is not None:
                self._state(keep.request_id, keep.first_token + keep.rows, keep.state_blocks)
            if self._keeper is None or kv is None:
                continue
            own = None if hidden is None else part_of(hidden, 1, at, keep.rows)
            rows = part_of(kv, 2, at, keep.rows)
            self._keeper.add_rows(keep.request_id, keep.first_token, rows, own)
            if keep.put:
                self._keeper.put(keep.request_id)

    def _last_state(self, request_id: str, last: LastState) -> None:
        try:
            self._state(request_id, last.tokens, last.blocks)
        except Exception:  # whatever it is, the engine does not need it
            logger.exception("a state is not stored")

    def _state(self, request_id: str, tokens: int, blocks: Sequence[int]) -> None:
        """All ranks call it: each gives its heads' part of the state."""
        rows = self._codec.checkpoint_rows(self._model.read_states(blocks))
        local = self._model.local
        whole = self._model.shard.gather_units(
            rows.view(len(local.linear_layers), local.key_heads, -1)
        )
        if self._keeper is not None and whole is not None:
            self._keeper.add_state(request_id, tokens, whole.cpu())

    def _begin(self, request_id: str, begin: KeepBegin) -> None:
        if self._keeper is not None:
            self._keeper.begin(request_id, begin)

    def _forget(self, request_id: str) -> None:
        if self._keeper is not None:
            self._keeper.forget(request_id)


def part_of(rows: Tensor, dim: int, first: int, count: int) -> Tensor:
    """Rows of one request on the host; a copy, or they would keep the whole batch's alive."""
    if count == rows.shape[dim]:
        return rows.cpu()
    return rows.narrow(dim, first, count).to("cpu", copy=True)
