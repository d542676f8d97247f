"""How what a Put has brought comes to be listed.

Nothing here does I/O or locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName, Provenance, block_start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.store.claims import Claims
    from tailreplay.store.eviction_order import EvictionOrder
    from tailreplay.store.index import TokenIndex
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.record import Record
    from tailreplay.store.sums import Sums
    from tailreplay.store.views import Node

_BARE_BLOCKS = 1 << 14
"""Blocks without keys and values that the index takes, beside as many as it has with them."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """An object that a Put has brought to the CPU tier."""

    name: ObjectName
    end_token: int
    size: int
    provenance: Provenance
    tail_figures: bytes = b""


class Arrivals:
    """Lists objects that are in the CPU tier now.

    Args:
        index: where.
        sums: counts what is where.
        order: in which objects leave again.
        claims: who brings what.
    """

    def __init__(self, index: TokenIndex, sums: Sums, order: EvictionOrder, claims: Claims) -> None:
        self._index = index
        self._sums = sums
        self._order = order
        self._claims = claims

    def list(self, prompt: Prompt, arrived: Sequence[Arrived]) -> list[bool]:
        """As `Catalog.admit`, without the commit."""
        records = [self._record(prompt, one) for one in arrived]
        # Until `used` has put the whole prefix in order.
        self._order.use([record for record in records if record is not None])
        for record in records:
            if record is not None and record.name.kind is not Kind.CHECKPOINT:
                self._supersede(record)
        return [record is not None for record in records]

    def _record(self, prompt: Prompt, arrived: Arrived) -> Record | None:
        name, end_token = arrived.name, arrived.end_token
        if self._is_too_far(prompt, end_token):
            self._claims.release(name)
            return None
        self._claims.arrive(name)
        record, home = self._located(prompt, name.kind, end_token)
        if record.exists:  # what was there was approximate, and its size may be another
            self._sums.place(record, in_cpu=False, in_redis=False)
        record.size, record.provenance = arrived.size, arrived.provenance
        record.tail_figures = arrived.tail_figures
        self._sums.place(record, in_cpu=True)
        if self._claims.is_pending(name):
            self._claims.admit(record, self._index.block(prompt, home))
        return record

    def _located(self, prompt: Prompt, kind: Kind, end_token: int) -> tuple[Record, Node]:
        """An object's record, and the block whose manifest speaks of it."""
        if kind is Kind.CHECKPOINT:
            record = self._index.checkpoint_of(prompt, end_token)
            return record, self._index.trees.homes(record)[0]
        first = block_start(end_token)
        node = self._index.insert(prompt, min(first + KV_BLOCK_TOKENS, len(prompt)))
        return self._index.record_on(node, kind, end_token), node

    def _is_too_far(self, prompt: Prompt, end_token: int) -> bool:
        """Whether an object needs more blocks without keys and values than the index takes."""
        first = block_start(end_token)
        absent = self._index.absent_blocks(prompt, first)
        bare = len(self._index) - self._sums.kv_blocks
        return absent > 0 and bare + absent > _BARE_BLOCKS + self._sums.kv_blocks

    def _supersede(self, record: Record) -> None:
        """Makes the partial block that a longer sibling extends the next to be evicted."""
        shorter = self._index.paths.extended_by(record)
        for old in shorter.kv if record.name.kind is Kind.KV else shorter.hidden:
            if old.first_token == record.first_token and old.rows < record.rows:
                self._order.demote(old)
