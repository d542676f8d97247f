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


@dataclass
class HitRate:
    """Tokens asked for, and those of them whose rows came."""

    queried: int = 0
    loaded: int = 0

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
            loaded = self._load(self._prefixes[number])
            rate.queried += TOKENS
            rate.loaded += loaded
            if loaded < TOKENS:
                self._store.put(iter(self._frames[number]), lambda: None)
        return rate

    def _load(self, prefix: Prefix) -> int:
        request = pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
        found = self._store.match(request)
        there = max((run.end_token for run in found.runs if run.first_token == 0), default=0)
        if not there:
            return 0
        wanted = pb.FetchRequest(
            namespace=prefix.namespace,
            leaf=found.leaf,
            ranges=[span_range(Kind.KV, 0, there)],
        )
        frames = list(self._store.fetch(wanted, lambda: None))
        missing = any(frame.record.kind is RecordKind.MISSING for frame in frames)
        return 0 if missing else there
