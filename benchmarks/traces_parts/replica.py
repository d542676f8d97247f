"""An engine and a store that hold no payload: the real planner, catalog, index and evictor."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailreplay.connector.fetch_plan import FetchPlan, ModelShape
from tailreplay.connector.plan import plan_fetch, plan_put, prefill_cuts
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredCheckpoint, StoredPrefix
from tailreplay.store.arrivals import Arrived
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.objects import Kind, ObjectName, Provenance
from tailreplay.store.prompt import Prompt
from tailreplay.store.record import Record
from tailreplay.store.views import Match, Path

_SPACE = bytes(32)
_SHAPE = ModelShape(fa_layers=12, kv_heads=2, hidden_sources=11)


@dataclass(frozen=True)
class Model:
    """What a token costs.

    Attributes:
        kv_bytes: keys and values of a token.
        hidden_bytes: FA hiddens of a token.
        checkpoint_bytes: all states after one token.
        dense_flops: one token through the model, attention scores left out.
        attention_flops: of one token for each token before it.
        replay_flops: one token through the linear layers.
    """

    kv_bytes: int
    hidden_bytes: int
    checkpoint_bytes: int
    dense_flops: float
    attention_flops: float
    replay_flops: float

    def prefill(self, first: int, end: int) -> float:
        """FLOPs of a prefill of [first, end)."""
        return self.dense_flops * (end - first) + self.attention_flops * (end**2 - first**2) / 2


QWEN3_NEXT = Model(24_576, 49_152, 74 << 20, 6.4e9, 196_608, 4.1e9)
"""From the published config of the 80B model; states in float32."""


class Pool:
    """As `Tiers` to a catalog, with sizes for payload."""

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.used_bytes = 0
        self.evicted = Counter[Kind]()
        self._sizes: dict[ObjectName, int] = {}

    def put(self, name: ObjectName, size: int) -> bool:
        if self.used_bytes + size > self.pool_bytes:
            return False
        self._sizes[name] = size
        self.used_bytes += size
        return True

    def evict(self, names: Sequence[ObjectName]) -> int:
        freed = 0
        for name in names:
            size = self._sizes.pop(name, 0)
            self.evicted[name.kind] += size
            freed += size
        self.used_bytes -= freed
        return freed

    def tell_released(self, tell: Callable[[], None]) -> None:
        """Nothing is ever on its way from here."""

    def resident(self, names: Sequence[ObjectName]) -> list[bool]:
        return [name in self._sizes for name in names]


class Replica:
    """One engine with one store.

    Args:
        model: costs.
        catalog: with the evictor in question.
        pool: what the catalog evicts from.
        policy: of the engine.
        kinds: what it stores beside keys and values.
    """

    def __init__(
        self, model: Model, catalog: Catalog, pool: Pool, policy: CachePolicy, kinds: set[Kind]
    ) -> None:
        self._model, self._catalog, self._pool = model, catalog, pool
        self._policy, self._kinds = policy, kinds
        self.sums = Counter[str]()
        catalog.attach(pool)

    def serve(self, tokens: NDArray[np.uint64]) -> None:
        """One prompt: lookup, plan, what of it is used, what is stored."""
        total = len(tokens)
        prompt = Prompt(_SPACE, tokens, digest_key(_SPACE))
        found, path = self._catalog.peek(prompt)
        stored = _stored(found)
        plan = plan_fetch(stored, total, self._policy, _SHAPE)
        self._count(plan, total)
        if plan.ranges:
            self._catalog.used(_fetched(found, path, plan))
        for kind, first, end in self._objects(stored, plan, total):
            self._put(prompt, kind, end, self._size(kind, end - first))
        self._catalog.used_prefix(prompt)

    def _count(self, plan: FetchPlan, total: int) -> None:
        # A replay or a prefill that starts at 0 has nothing before it.
        work = self._model.prefill(plan.prefill_from, total)
        work += self._model.replay_flops * plan.replayed_tokens
        self.sums["prompt_tokens"] += total
        self.sums["used_tokens"] += plan.used_tokens
        self.sums["mflops"] += int(work / 1e6)
        self.sums["full_mflops"] += int(self._model.prefill(0, total) / 1e6)

    def _objects(
        self, stored: StoredPrefix, plan: FetchPlan, total: int
    ) -> Iterable[tuple[Kind, int, int]]:
        first = plan.prefill_from
        if Kind.CHECKPOINT in self._kinds and plan.exact:
            keep = plan.matched_tokens if plan.mode == "miss" else plan.used_tokens
            cuts = prefill_cuts(first, total, self._policy.prefill_chunk_tokens, keep)
            cuts += [first] if plan.replayed_tokens else []
            for cut in cuts:
                yield Kind.CHECKPOINT, cut - 1, cut
        for kind, start, end in plan_put(stored, total, first):
            if kind is Kind.KV or kind in self._kinds:
                yield kind, start, end

    def _put(self, prompt: Prompt, kind: Kind, end: int, size: int) -> None:
        name = ObjectName(_SPACE, kind, prompt.chain.prefix_hash(end))
        if not self._catalog.claim(prompt, name, end, size):
            return
        while not self._pool.put(name, size):
            if not self._catalog.room.make(size):
                self._catalog.unclaim(name)
                self.sums["dropped"] += 1
                return
        self._catalog.admit(prompt, [Arrived(name, end, size, Provenance.EXACT)])

    def _size(self, kind: Kind, rows: int) -> int:
        if kind is Kind.CHECKPOINT:
            return self._model.checkpoint_bytes
        return rows * (self._model.kv_bytes if kind is Kind.KV else self._model.hidden_bytes)


def _stored(found: Match) -> StoredPrefix:
    """A match as an engine sees it; all that is simulated is exact."""
    kv = [(r.first_token, r.end_token) for r in found.runs if r.kind is Kind.KV]
    hidden = [(r.first_token, r.end_token) for r in found.runs if r.kind is Kind.HIDDEN]
    return StoredPrefix(
        found.matched_tokens,
        found.leaf,
        kv[0][1] if kv and not kv[0][0] else 0,
        0,
        tuple(hidden),
        tuple(StoredCheckpoint(r.end_token, r.name.prefix_hash) for r in found.checkpoints),
    )


def _fetched(found: Match, path: Path, plan: FetchPlan) -> list[Record]:
    """Records that a plan asks for."""
    wanted: list[Record] = []
    for kind, first, end in {(Kind(r.kind), r.first_token, r.end_token) for r in plan.ranges}:
        if kind is Kind.CHECKPOINT:
            wanted += [r for r in found.checkpoints if r.end_token == end]
            continue
        records = path.of(kind)
        wanted += [r for r in records if r.end_token > first and r.first_token < end]
    return wanted


class LruCatalog(Catalog):
    """As the store's, but every object of a prompt counts as used when something is stored."""

    def used_prefix(self, prompt: Prompt) -> None:
        found, path = self.peek(prompt)
        self.used([*found.checkpoints, *path.hidden, *path.kv])


ENGINES: dict[str, tuple[CachePolicy, set[Kind]]] = {
    "exact": (CachePolicy(mode="exact"), {Kind.CHECKPOINT}),
    "exact+hiddens": (CachePolicy(mode="exact"), {Kind.CHECKPOINT, Kind.HIDDEN}),
    "tail 10%": (CachePolicy(mode="tail", replay_ratio=0.1), {Kind.HIDDEN}),
}
"""How an engine uses hits, and what it stores beside keys and values."""


def served(
    prompts: Iterable[NDArray[np.uint64]], engine: str, catalog: Catalog, pool_bytes: int
) -> dict[str, float]:
    """Serves prompts one after the other; `hit` and `work` as parts of all."""
    replica = Replica(QWEN3_NEXT, catalog, Pool(pool_bytes), *ENGINES[engine])
    for tokens in prompts:
        replica.serve(tokens)
    sums = replica.sums
    return {
        "hit": round(sums["used_tokens"] / sums["prompt_tokens"], 4),
        "work": round(sums["mflops"] / sums["full_mflops"], 4),
    }
