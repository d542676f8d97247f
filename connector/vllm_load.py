"""One rank's part of a load: which rows it asks for, and the threads that wait for them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import torch

from tailreplay.connector.load import Load, LoadFailed
from tailreplay.connector.vllm_meta import LOCAL
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.chain import PrefixChain
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tailreplay.connector.client import StoreClient
    from tailreplay.connector.model_dims import ModelDims
    from tailreplay.connector.stored import StoredCheckpoint
    from tailreplay.connector.vllm_meta import LoadOp
    from tailreplay.store.geometry import Geometry

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 120.0


class RankLoad:
    """A load on this rank: ranges, buffers, and whether they have come.

    Tail first: the state and the hiddens, in replay order, then keys and values layer by layer.

    Args:
        op: what to load.
        whole: shapes of the model.
        local: shapes of this rank's share.
        first_kv_head: this rank's first KV head.
        rank: this rank.

    Attributes:
        op: as given.
        kv_first: position of the first row of keys and values that is fetched.
        ranges: what is fetched, in order.
    """

    def __init__(
        self, op: LoadOp, whole: ModelDims, local: ModelDims, first_kv_head: int, rank: int
    ) -> None:
        self.op = op
        self.kv_first = _kv_first(op)
        state = _state_ranges(op.plan.checkpoint, whole, local, rank)
        hidden = _hidden_ranges(op, whole)
        kv = _kv_ranges(self.kv_first, op.plan.prefill_from, whole, local, first_kv_head)
        self.ranges = [*state, *hidden, *kv]
        self.state_numbers = range(len(state))
        self.hidden_numbers = range(len(state), len(state) + len(hidden))
        self.kv_numbers = range(len(state) + len(hidden), len(self.ranges))
        self.load: Load | None = None

    def start(
        self,
        client: StoreClient,
        geometry: Mapping[Kind, Geometry],
        stall_timeout_s: float,
        over: Callable[[str, str | None], None],
    ) -> None:
        """Begins to fetch; calls `over(request_id, reason)` from a thread, None = all is here."""
        chain = PrefixChain(self.op.namespace, self.op.tokens)
        load = Load(
            self.ranges,
            geometry,
            chain,
            stall_timeout_s=stall_timeout_s,
            on_event=lambda name, wanted: None,
        )
        self.load = load

        def fetch() -> None:
            over(self.op.request_id, self._fetch(client, load))

        threading.Thread(target=fetch, name="tailreplay-load", daemon=True).start()

    def rows(self, number: int) -> Tensor:
        """A range that has come, `[units, rows, row bytes]` uint8."""
        assert self.load is not None
        return torch.from_numpy(self.load.buffers[number])

    def cancel(self) -> None:
        """Ends the fetch."""
        if self.load is not None:
            self.load.cancel()

    def _fetch(self, client: StoreClient, load: Load) -> str | None:
        """Waits for every range; returns the reason if one does not come."""
        if not self.ranges:
            return None
        try:
            stream = client.fetch(
                self.op.namespace, self.op.leaf, self.ranges, timeout_s=_FETCH_TIMEOUT_S
            )
            threading.Thread(
                target=load.run, args=(stream,), name="tailreplay-read", daemon=True
            ).start()
            for number in range(len(self.ranges)):
                load.wait(number)
        except LoadFailed as failure:
            load.cancel()
            logger.info("a load failed, prefill instead: %s", failure)
            return failure.reason
        except TailReplayError as error:
            logger.info("a load failed, prefill instead: %s", error)
            return "store_down"
        return None


def _kv_first(op: LoadOp) -> int:
    """First row to fetch: what vLLM lacks, and the start of the block that is stored next."""
    block = op.plan.used_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    return min(op.local_tokens, block)


def _state_ranges(
    checkpoint: StoredCheckpoint | None, whole: ModelDims, local: ModelDims, rank: int
) -> list[pb.Range]:
    """One range for all key heads, or one a layer for a share of them."""
    if checkpoint is None or checkpoint.prefix_hash == LOCAL:
        return []
    layers = len(whole.linear_layers)
    firsts = [layer * whole.key_heads + rank * local.key_heads for layer in range(layers)]
    units = local.key_heads
    if local.key_heads == whole.key_heads:
        firsts, units = [0], layers * whole.key_heads
    return [
        pb.Range(
            kind=pb.KIND_CHECKPOINT,
            first_token=checkpoint.token - 1,
            end_token=checkpoint.token,
            first_unit=first,
            units=units,
            prefix_hash=checkpoint.prefix_hash,
        )
        for first in firsts
    ]


def _hidden_ranges(op: LoadOp, whole: ModelDims) -> list[pb.Range]:
    if op.plan.replay_first is None:
        return []
    return [
        pb.Range(
            kind=pb.KIND_HIDDEN,
            first_token=op.plan.replay_first,
            end_token=op.plan.prefill_from,
            first_unit=source,
            units=1,
        )
        for source in range(len(whole.hidden_sources))
    ]


def _kv_ranges(
    first: int, end: int, whole: ModelDims, local: ModelDims, first_kv_head: int
) -> list[pb.Range]:
    if first >= end:
        return []
    return [
        pb.Range(
            kind=pb.KIND_KV,
            first_token=first,
            end_token=end,
            first_unit=layer * whole.kv_heads + first_kv_head,
            units=local.kv_heads,
        )
        for layer in range(len(whole.fa_layers))
    ]
