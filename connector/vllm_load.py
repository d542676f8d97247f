"""One rank's part of a load: which rows it asks for, and the threads that wait for them."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailreplay.connector.device_load import names_along, skipped_rows
from tailreplay.connector.load import Load, LoadFailed
from tailreplay.connector.report import why_missed
from tailreplay.connector.vllm_meta import LOCAL
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.chain import PrefixChain
from tailreplay.store.errors import TailReplayError
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tailreplay.connector.client import StoreClient
    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.device_rows import DeviceRows
    from tailreplay.connector.model_dims import ModelDims
    from tailreplay.connector.stored import StoredCheckpoint
    from tailreplay.connector.vllm_meta import LoadOp
    from tailreplay.store.geometry import Geometry

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 120.0


@dataclass(slots=True)
class _Part:
    """One range: what the GPU tier has of its beginning, and which fetched range is the rest.

    `units` are the range's among those that this rank has in the tier.
    """

    wanted: pb.Range
    units: slice
    held: DeviceRows | None = None
    taken: int = 0
    number: int | None = None


class RankLoad:
    """A load on this rank: ranges, buffers, and whether they have come.

    Tail first: the state and the hiddens, in replay order, then keys and values layer by layer.

    Args:
        op: what to load.
        whole: shapes of the model.
        local: shapes of this rank's share.
        first_kv_head: this rank's first KV head.
        rank: this rank.
        pool: this rank's GPU tier; None without one.

    Attributes:
        op: as given.
        kv_first: position of the first row of keys and values that is wanted.
        ranges: what is wanted, in order.
        left: what of that is fetched.
        state_numbers: which of `ranges` are of the state; none where it is vLLM's own.
        hidden_numbers: which are of hiddens, one a source, in replay order.
        kv_numbers: which are of keys and values, one a full-attention layer.
        load: what is fetched, once that has begun.
    """

    def __init__(
        self,
        op: LoadOp,
        whole: ModelDims,
        local: ModelDims,
        first_kv_head: int,
        rank: int,
        pool: DevicePool | None = None,
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
        self._parts = [
            _Part(wanted, slice(number * wanted.units, (number + 1) * wanted.units))
            for kind in (state, hidden, kv)
            for number, wanted in enumerate(kind)
        ]
        if pool is not None:
            self._hold(pool)
        self.left = self._rest()
        self.load: Load | None = None

    def start(
        self,
        client: StoreClient,
        geometry: Mapping[Kind, Geometry],
        stall_timeout_s: float,
        over: Callable[[str, str | None], None],
    ) -> None:
        """Begins to fetch; calls `over(request_id, reason)`, from a thread; None = all is here."""
        if not self.left:
            over(self.op.request_id, None)
            return
        chain = PrefixChain(self.op.namespace, self.op.tokens)
        load = Load(
            self.left,
            geometry,
            chain,
            stall_timeout_s=stall_timeout_s,
            on_event=lambda name, wanted: None,
        )
        self.load = load

        def fetch() -> None:
            over(self.op.request_id, self._fetch(client, load))

        threading.Thread(target=fetch, name="tailreplay-load", daemon=True).start()

    def rows(self, number: int, first: int | None = None, end: int | None = None) -> Tensor:
        """Rows [first, end) of a range that has come, `[units, rows, row bytes]` uint8.

        On the device where the GPU tier has some of them, else on the host.
        """
        part = self._parts[number]
        at = part.wanted.first_token
        start = 0 if first is None else first - at
        stop = part.wanted.end_token - at if end is None else end - at
        found = []
        if start < part.taken:
            assert part.held is not None
            skipped = skipped_rows(part.wanted)
            inside = (start + skipped, min(stop, part.taken) + skipped)
            found.append(part.held.rows(part.units, *inside))
        if stop > part.taken or not found:
            assert self.load is not None
            assert part.number is not None
            buffer = torch.from_numpy(self.load.buffers[part.number])
            rest = buffer[:, max(0, start - part.taken) : stop - part.taken]
            found.append(rest.to(found[0].device) if found else rest)
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Payload bytes that have come, by tier ('gpu', 'cpu', 'redis') and kind."""
        found: dict[str, dict[str, int]] = {}
        for part in self._parts:
            if part.held is not None:
                sizes = found.setdefault("gpu", {})
                kind = Kind(part.wanted.kind).name.lower()
                size = part.taken * part.wanted.units * part.held.row_bytes
                sizes[kind] = sizes.get(kind, 0) + size
        fetched = {} if self.load is None else self.load.bytes_by_tier()
        for (tier, of), size in fetched.items():
            found.setdefault(tier, {})[of.name.lower()] = size
        return found

    def cancel(self) -> None:
        """Ends the fetch, and lets the GPU tier have its rows back."""
        if self.load is not None:
            self.load.cancel()
        self.release()

    def release(self) -> None:
        """Lets the GPU tier have its rows back: no more of them are read."""
        for part in self._parts:
            if part.held is not None:
                part.held.release()

    def _hold(self, pool: DevicePool) -> None:
        """Takes into use what the GPU tier has; the state last, so that it goes last."""
        chain = PrefixChain(self.op.namespace, self.op.tokens)
        for part in reversed(self._parts):
            wanted = part.wanted
            part.held = pool.hold(names_along(wanted, chain))
            if part.held is not None:
                rows = len(part.held) - skipped_rows(wanted)
                part.taken = min(rows, wanted.end_token - wanted.first_token)

    def _rest(self) -> list[pb.Range]:
        """What is left to fetch."""
        left: list[pb.Range] = []
        for part in self._parts:
            wanted = part.wanted
            if wanted.first_token + part.taken == wanted.end_token:
                continue
            rest = pb.Range()
            rest.CopyFrom(wanted)
            rest.first_token += part.taken
            part.number = len(left)
            left.append(rest)
        return left

    def _fetch(self, client: StoreClient, load: Load) -> str | None:
        """Waits for every range; returns the reason if one does not come."""
        try:
            stream = client.fetch(
                self.op.namespace, self.op.leaf, self.left, timeout_s=_FETCH_TIMEOUT_S
            )
            threading.Thread(
                target=load.run, args=(stream,), name="tailreplay-read", daemon=True
            ).start()
            for number in range(len(self.left)):
                load.wait(number)
        except LoadFailed as failure:
            load.cancel()
            logger.info("a load failed, prefill instead: %s", failure)
            return failure.reason
        except TailReplayError as error:
            logger.info("a load failed, prefill instead: %s", error)
            return why_missed(error)
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
