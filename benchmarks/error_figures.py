"""How well the tails that a store's figures ask for keep their error budget.

    python -P benchmarks/error_figures.py
    python -P benchmarks/error_figures.py --samples 2 --models state olmo
    python -P benchmarks/error_figures.py --cost

An engine prefills a prefix and stores it; the figures for a boundary inside are those that Match
gives for it. Then every tail is replayed, group by group, and held against them.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import numpy as np
import torch
from mini import model as minis
from mini.tasks import TASKS, Corpus, Load
from mini.tokenizer import Tokenizer
from torch import Tensor

from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf import CachePolicy, HybridEngine
from tailreplay.connector.hf_cache import HybridCache
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.stored import stored_prefix
from tailreplay.connector.tail_figures import BUDGETS, unpack
from tailreplay.connector.tail_plan import CONV_ROWS
from tailreplay.replay.tail_error import span_tails, tried_lengths
from tailreplay.store import serve_in_thread
from tailreplay.store.tokens import extended_tokens

LENGTHS = {"retrieval": (1000, 2000), "state": (500,), "tracking": (500,), "olmo": (250,)}
_BOUNDARIES = 2


@dataclass(frozen=True)
class Case:
    """One boundary: what the store says of it, and what every tail really does.

    Attributes:
        m: tokens before it.
        tails: what the figures ask for, `[groups, budgets]`, 0 = not known.
        places: of each group's layers among the linear layers.
        tried: lengths of the tails that were replayed, the last one m.
        heads: relative error of each head's state, `[tried, L, HV]`.
        layers: the same of each layer, `[tried, L]`.
    """

    m: int
    tails: Tensor
    places: list[list[int]]
    tried: list[int]
    heads: Tensor
    layers: Tensor


class Bench:
    """A miniature behind an engine and a store."""

    def __init__(self, name: str, address: str) -> None:
        policy = CachePolicy(match_timeout_s=20.0, stall_timeout_s=20.0)
        self._net = minis.load(name)
        self._view = HybridModel(self._net)
        self._client = StoreClient(address)
        self._engine = HybridEngine(self._net, self._client, policy)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()
        self._client.close()

    def cases(self, tokens: Tensor, boundaries: list[int]) -> Iterator[Case]:
        """Stores a prefix, then looks at some boundaries inside it."""
        self._engine.generate(tokens.tolist(), 1)
        if not self._engine.flush(60):
            raise RuntimeError("the prefix was not stored within 60 s")
        for m in boundaries:
            yield self._case(tokens[:m], self._figures(tokens[:m]))

    def _figures(self, tokens: Tensor) -> Tensor:
        found = self._client.match(
            self._engine.namespace, extended_tokens(tokens.tolist()), timeout_s=20.0
        )
        if found.matched_tokens != len(tokens):
            raise RuntimeError(f"{found.matched_tokens} tokens match, wanted {len(tokens)}")
        return torch.from_numpy(unpack(stored_prefix(found).figures_at(len(tokens))))

    def _case(self, tokens: Tensor, tails: Tensor) -> Case:
        view, m = self._view, len(tokens)
        cache = view.new_cache()
        with view.watch.capture() as hidden:
            view.forward(tokens, cache)
        wanted = _recurrent(cache)
        rows = {
            g.source: tokens if g.source is None else hidden.rows(g.source) for g in view.groups
        }
        tried = [*tried_lengths(m), m]
        off = torch.stack([self._replayed(rows, m - k) - wanted for k in tried])
        norms, lost = (x.flatten(-2).norm(dim=-1) for x in (wanted, off))
        layers = lost.norm(dim=-1) / norms.norm(dim=-1)
        return Case(m, tails, view.group_places, tried, lost / norms, layers)

    def _replayed(self, rows: dict[int | None, Tensor], start: int) -> Tensor:
        cache = self._view.new_cache()
        for group in self._view.groups:
            own = rows[group.source][max(0, start - CONV_ROWS) :]
            self._view.replay_group(group, own, cache)
        return _recurrent(cache)


def figures(cases: list[Case], budget: int) -> dict[str, float]:
    """How well the tails chosen for a budget, by its number, keep it.

    Returns:
        heads: share of (boundary, layer, head) whose error is within the budget at the tail of
            their group.
        layers: the same of (boundary, layer), all heads together.
        ratio: median over (boundary, group) of the tail over the shortest that would have done.
        share: rows replayed, mean over groups, as a part of m; mean.
        left: error that the tails leave, mean over layers.
    """
    heads, layers, ratios, shares = [], [], [], []
    for one in cases:
        asked = [min(int(tail[budget]) or one.m, one.m) for tail in one.tails]
        shares.append(float(np.mean(asked)) / one.m)
        for tail, places in zip(asked, one.places, strict=True):
            # The longest tail tried that is no longer; a figure is one of those, or m.
            at = max(i for i, k in enumerate(one.tried) if k <= tail)
            heads.append(one.heads[at, places].flatten())
            layers.append(one.layers[at, places])
            within = (one.layers[:, places] <= BUDGETS[budget]).all(1).tolist()
            ratios.append(tail / one.tried[within.index(True) if True in within else -1])
    return {
        "heads": (torch.cat(heads) <= BUDGETS[budget]).double().mean().item(),
        "layers": (torch.cat(layers) <= BUDGETS[budget]).double().mean().item(),
        "ratio": float(np.median(ratios)),
        "share": float(np.mean(shares)),
        "left": torch.cat(layers).mean().item(),
    }


def cost(ids: Any, pairs: int = 9) -> dict[str, float]:  # noqa: ANN401 - token ids
    """CPU seconds of a prefill with its decays and norms noted, over one without; and of the rest.

    Returns:
        ratio: median over interleaved pairs, in steps of 1,024 tokens.
        figures_s: median CPU time of working out the figures of all pages, afterwards.
    """
    view, tokens = HybridModel(minis.load("retrieval")), torch.from_numpy(ids.copy())
    ratios, rest = [], []
    for _ in range(pairs + 1):
        noted_s, trace = _prefilled(view, tokens, view.watch.trace())
        plain_s, _ = _prefilled(view, tokens, nullcontext())
        started_s = time.process_time()
        pages = [(at, at + 64) for at in range(0, len(tokens), 64)]
        span_tails(trace, view.group_places, pages)
        rest.append(time.process_time() - started_s)
        ratios.append(noted_s / plain_s)
    return {"ratio": float(np.median(ratios[1:])), "figures_s": float(np.median(rest[1:]))}


def _prefilled(view: HybridModel, tokens: Tensor, tracing: Any) -> tuple[float, Any]:  # noqa: ANN401
    """CPU seconds of a prefill, and what was noted in it."""
    cache, started_s = view.new_cache(), time.process_time()
    with tracing as trace:
        for start in range(0, len(tokens), 1024):
            part = tokens[start : start + 1024]
            view.forward(part, cache)
            if trace is not None:
                cache.note_states(trace, start + len(part))
    return time.process_time() - started_s, trace


def main() -> None:
    """Prints a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=6, help="prefixes of each kind")
    parser.add_argument("--models", nargs="*", choices=LENGTHS, default=[*LENGTHS])
    parser.add_argument("--cost", action="store_true", help="what noting the figures costs, alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus, report = Corpus(Tokenizer.load()), {}
    if arguments.cost:
        print(json.dumps(cost(corpus.train[:2048])))
        return
    samples = arguments.samples
    print("| model, prefix | tokens | eps | heads met | layers met | tail / shortest | tail / m |")
    print("|---|---|---|---|---|---|---|")
    lengths = [(name, length) for name in arguments.models for length in LENGTHS[name]]
    for (name, length), kind in itertools.product(lengths, ("text", "needles")):
        found = list(_measured(name, corpus, kind, length, samples))
        for number, budget in enumerate(BUDGETS):
            row = report[f"{name}, {kind}, {length}, {budget:g}"] = figures(found, number)
            cells = " | ".join(f"{row[key]:.3f}" for key in ("heads", "layers", "ratio", "share"))
            print(f"| {name}, {kind} | {length} | {budget:g} | {cells} |", flush=True)
    print(json.dumps(report))


def _measured(name: str, corpus: Corpus, kind: str, length: int, samples: int) -> Iterator[Case]:
    rng = np.random.default_rng(11)
    with serve_in_thread(stall_limit_s=60.0) as server:
        bench = Bench(name, server.address)
        try:
            for _ in range(samples):
                tokens = _prefix(corpus, rng, kind, length)
                places = rng.integers(length // 2, length, _BOUNDARIES).tolist()
                yield from bench.cases(tokens, places)
        finally:
            bench.close()


def _prefix(corpus: Corpus, rng: np.random.Generator, kind: str, length: int) -> Tensor:
    if kind == "text":
        return torch.from_numpy(corpus.passage(rng, length, held_back=True).copy())
    row = TASKS[kind](corpus, rng, Load(length + 5, length // 32, 1))
    return torch.from_numpy(row.ids[: row.boundary])


def _recurrent(cache: HybridCache) -> Tensor:
    """`[L, HV, K, V]` in fp32."""
    return torch.stack([state.recurrent for state in cache.states().values()])


if __name__ == "__main__":
    main()
