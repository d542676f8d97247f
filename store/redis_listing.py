"""What the index lists because Redis has it: listed when it is read of, forgotten when it expires.

Nothing here does I/O or locks: the catalog calls it under its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind, ObjectName, Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.index import TokenIndex
    from tailreplay.store.manifest_form import Entry
    from tailreplay.store.prompt import Prompt
    from tailreplay.store.record import Record
    from tailreplay.store.shared_index import Beyond
    from tailreplay.store.views import Block, Node

_LEARNT_LIFE_S = 600.0
"""How long something read of in a lookup is taken to be in Redis; then it is asked for again."""
_ROWS = 1 << 17
"""Rows looked at under one hold of the lock, a third of a millisecond."""
_FORGOTTEN = 256
"""Objects forgotten under one hold of the lock, two to three milliseconds."""
_SAMPLE = 1 << 14


class _Place(Protocol):
    def __call__(self, record: Record, *, in_redis: bool) -> None: ...


class RedisListing:
    """Lists and forgets.

    Args:
        index: where.
        place: notes where an object is now.
        clock: seconds that only grow.
        max_blocks: above so many blocks in the index, what only Redis has is forgotten early.
    """

    def __init__(
        self, index: TokenIndex, place: _Place, clock: Callable[[], float], max_blocks: int
    ) -> None:
        self._index = index
        self._place = place
        self._clock = clock
        self._max_blocks = max_blocks

    def learn(self, prompt: Prompt, beyond: Beyond) -> None:
        """Lists what Redis has of a prompt."""
        node = self._index.insert(prompt, beyond.at_token)
        self._list(prompt.namespace, node, beyond.states)
        for found in beyond.whole:
            node = self._index.insert(prompt, node.end_token + KV_BLOCK_TOKENS)
            self._list(prompt.namespace, node, found.entries)
        if beyond.last is not None:
            self.restore(beyond.last.block, beyond.last.entries)

    def restore(self, block: Block, entries: Sequence[Entry]) -> int:
        """Lists a block's objects; returns how many of them are new."""
        node = self._index.foreign.restore(block)
        return self._list(block.namespace, node, entries) if node is not None else 0

    def forget_some(self, first: int) -> tuple[int, int]:
        """Forgets expired objects among some rows; what only Redis has early if there is too much.

        Args:
            first: row to begin with.

        Returns:
            How many it has forgotten, and the row to go on from; 0 = that was all.
        """
        until_s, only_redis = self._clock(), False
        if len(self._index) > self._max_blocks:
            untils = self._index.trees.objects.expiries(_SAMPLE)
            share = min(1.0, 1.1 - self._max_blocks / len(self._index))
            if len(untils):
                until_s, only_redis = max(until_s, float(np.quantile(untils, share))), True
        gone, following = self._index.sweep.expired(
            until_s, first, _ROWS, most=_FORGOTTEN, only_redis=only_redis
        )
        for record in gone:
            self._place(record, in_redis=False)
            self._index.trees.prune(record)
        return len(gone), following

    def _list(self, namespace: bytes, node: Node, entries: Sequence[Entry]) -> int:
        listed, kv, hidden = 0, node.kv, node.hidden
        for entry in entries:
            record: Record | None
            if entry.kind is Kind.KV:
                record = kv
            elif entry.kind is Kind.HIDDEN:
                record = hidden[entry.page] if entry.page < len(hidden) else None
            else:
                name = ObjectName(namespace, Kind.CHECKPOINT, entry.state_hash, entry.placed_by)
                record = self._index.foreign.checkpoint(
                    node, name, entry.end_token, entry.state_digest
                )
            if record is not None and _is_news(record, entry):
                self._note(record, entry)
                listed += 1
        return listed

    def _note(self, record: Record, entry: Entry) -> None:
        if record.exists:  # what was known of it is approximate, and its size may be another
            self._place(record, in_redis=False)
        record.size, record.provenance = entry.size, entry.provenance
        record.tail_figures = entry.tail_figures
        record.redis_until_s = self._clock() + (entry.life_s or _LEARNT_LIFE_S)
        self._place(record, in_redis=True)


def _is_news(record: Record, entry: Entry) -> bool:
    """Whether Redis has an object that no tier had, or better than Redis was known to have it."""
    better = record.provenance is Provenance.APPROXIMATE and entry.provenance is Provenance.EXACT
    return not record.exists or (better and not record.in_cpu)
