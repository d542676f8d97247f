"""A load whose first rows come out of the GPU tier, and the rest from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailreplay.connector.load import Load, fresh
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import PAGE_TOKENS, Kind, ObjectName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.fetch_stream import FetchStream
    from tailreplay.connector.lane_stream import LaneStream
    from tailreplay.store.chain import PrefixChain
    from tailreplay.store.geometry import Geometry


class DeviceLoad:
    """Like `Load`, with buffers on the device.

    Args:
        ranges: what is wanted; of each, the leading rows that the pool has are not asked for.
        geometry: what objects of each kind look like.
        chain: names the prompt's objects.
        pool: the GPU tier.
        stall_timeout_s: as in `Load`.
        on_event: as in `Load`.

    Attributes:
        buffers: per range `[units, rows, row bytes]` uint8; filled when `wait` returns for it.
        ranges: what is left to fetch.
    """

    def __init__(
        self,
        ranges: Sequence[pb.Range],
        geometry: Mapping[Kind, Geometry],
        chain: PrefixChain,
        *,
        pool: DevicePool,
        stall_timeout_s: float,
        on_event: Callable[[str, pb.Range], None],
    ) -> None:
        self._pool, self._chain, device = pool, chain, pool.device
        self._bytes: dict[tuple[str, Kind], int] = {}
        self.buffers = [_empty(wanted, geometry, device) for wanted in ranges]
        self.ranges: list[pb.Range] = []
        # Of each range: which of those left to fetch has its rest, and from which row on.
        self._rest: list[tuple[int, int] | None] = []
        for wanted, buffer in zip(ranges, self.buffers, strict=True):
            taken = self._take(wanted, buffer)
            if taken == buffer.shape[1]:
                self._rest.append(None)
                on_event("complete", wanted)
                continue
            left = pb.Range()
            left.CopyFrom(wanted)
            left.first_token += taken
            self._rest.append((len(self.ranges), taken))
            self.ranges.append(left)
        rests = zip(self.buffers, self._rest, strict=True)
        targets = iter([buffer[:, rest[1] :] for buffer, rest in rests if rest is not None])
        self._load = Load(
            self.ranges,
            geometry,
            chain,
            stall_timeout_s=stall_timeout_s,
            on_event=on_event,
            # On a CPU the rest goes straight to its place.
            allocate=(lambda _: next(targets).numpy()) if device.type == "cpu" else fresh,
        )

    @property
    def size_bytes(self) -> int:
        """As `Load.size_bytes`, of what is left to fetch."""
        return self._load.size_bytes

    @property
    def seconds(self) -> float:
        """As `Load.seconds`."""
        return self._load.seconds

    def run(self, stream: FetchStream | LaneStream) -> None:
        """As `Load.run`; only where there is something left to fetch."""
        self._load.run(stream)

    def wait(self, number: int) -> Tensor:
        """Blocks until a range is complete; returns its buffer.

        Raises:
            LoadFailed: it will not come.
        """
        whole, rest = self.buffers[number], self._rest[number]
        if rest is not None:
            came = self._load.wait(rest[0])
            if whole.device.type != "cpu":
                whole[:, rest[1] :].copy_(torch.from_numpy(came))
        return whole

    def cancel(self) -> None:
        """As `Load.cancel`."""
        self._load.cancel()

    def bytes_by_tier(self) -> dict[tuple[str, Kind], int]:
        """Payload bytes by tier ('gpu', 'cpu', 'redis') and kind."""
        return self._bytes | self._load.bytes_by_tier()

    def _take(self, wanted: pb.Range, buffer: Tensor) -> int:
        """Copies the leading rows that the pool has; returns how many."""
        held = self._pool.hold(names_along(wanted, self._chain))
        if held is None:
            return 0
        kind, skipped = Kind(wanted.kind), skipped_rows(wanted)
        taken = min(len(held) - skipped, buffer.shape[1])
        units = slice(wanted.first_unit, wanted.first_unit + buffer.shape[0])
        buffer[:, :taken] = held.rows(units, skipped, skipped + taken)
        held.release()
        size = buffer[:, :taken].nbytes
        self._bytes["gpu", kind] = self._bytes.get(("gpu", kind), 0) + size
        return taken


def names_along(wanted: pb.Range, chain: PrefixChain) -> Iterator[ObjectName]:
    """What the pool calls the objects of a range, in order: pages by their end, or a state."""
    kind = Kind(wanted.kind)
    if kind is Kind.CHECKPOINT:
        yield ObjectName(chain.namespace, kind, wanted.prefix_hash)
        return
    first = wanted.first_token - skipped_rows(wanted)
    for page in range(first, wanted.end_token, PAGE_TOKENS):
        if page + PAGE_TOKENS > len(chain):
            break
        yield ObjectName(chain.namespace, kind, chain.prefix_hash(page + PAGE_TOKENS))


def skipped_rows(wanted: pb.Range) -> int:
    """Rows of a range's first object that lie before it."""
    return 0 if int(wanted.kind) == Kind.CHECKPOINT else wanted.first_token % PAGE_TOKENS


def _empty(wanted: pb.Range, geometry: Mapping[Kind, Geometry], device: torch.device) -> Tensor:
    shape = geometry[Kind(wanted.kind)]
    units = wanted.units or shape.units - wanted.first_unit
    rows = wanted.end_token - wanted.first_token
    return torch.empty((units, rows, shape.row_bytes), dtype=torch.uint8, device=device)
