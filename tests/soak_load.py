"""Requests of many prompts, some asked for far more often than others, against one store."""

from __future__ import annotations

import random
from dataclasses import dataclass

from store_objects import Prefix, put_frames, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.core import Store
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire

TOKENS = 512
_LOOKED_AT = 1 / 16


@dataclass
class HitRate:
    """Tokens asked for, those whose rows came, and prompts of whose rows some were wrong."""

    queried: int = 0
    loaded: int = 0
    wrong: int = 0

    @property
    def share(self) -> float:
        return self.loaded / self.queried


class Soak:
    """One stream of requests: each looks a prompt up, reads what is there, and puts the rest.

    Args:
        store: who serves them.
        namespace: 32 bytes.
        prompts: how many there are; the pool should hold a part of them.
        seed: of the order.
    """

    def __init__(self, store: Store, namespace: bytes, prompts: int, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._prefixes = [
            Prefix(namespace, [number, *range(TOKENS - 1)]) for number in range(prompts)
        ]
        self._frames = [list(put_frames(p, p.spans(Kind.KV))) for p in self._prefixes]
        self._weights = [1 / (rank + 1) for rank in range(prompts)]

    def requests(self, count: int) -> list[int]:
        """Numbers of prompts, the first ones most often."""
        return self._random.choices(range(len(self._prefixes)), self._weights, k=count)

    def serve(self, requests: list[int]) -> HitRate:
        """Serves them; returns what hit."""
        rate = HitRate()
        for number in requests:
            loaded, is_right = self._load(self._prefixes[number])
            rate.queried += TOKENS
            rate.wrong += not is_right
            rate.loaded += loaded
            if loaded < TOKENS:
                self._store.put(iter(self._frames[number]), lambda: None)
        return rate

    def _load(self, prefix: Prefix) -> tuple[int, bool]:
        """How many tokens came, and whether they were right, which is looked at now and then."""
        request = pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
        found = self._store.match(request)
        there = max((run.end_token for run in found.runs if run.first_token == 0), default=0)
        if not there:
            return 0, True
        wanted = pb.FetchRequest(
            namespace=prefix.namespace,
            leaf=found.leaf,
            ranges=[span_range(Kind.KV, 0, there)],
        )
        looked_at = self._random.random() < _LOOKED_AT
        rows = prefix.rows(Kind.KV, 0, there) if looked_at else b""
        step = len(rows) // (prefix.geometry[Kind.KV].units * there)
        missing, is_right = False, True
        for record, parts, *_ in self._store.fetch(wanted, lambda: None):
            missing |= record.kind is RecordKind.MISSING
            if looked_at and record.kind is RecordKind.ROWS:
                firsts = (
                    ((record.first_unit + unit) * there + record.first_token) * step
                    for unit in range(record.units)
                )
                size = record.rows * step
                is_right &= b"".join(parts) == b"".join(rows[at : at + size] for at in firsts)
        return 0 if missing else there, is_right
