"""What sharing costs an engine that never gets anything back."""

import gc
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from typing import Any

from store_parts.children import Child, cpu_s

Field = dict[str, Any]
Costs = dict[str, list[float]]

_PROMPT_TOKENS = 1024
_WIDTH, _VOCAB = 1024, 4096
_SHAPES: dict[str, Field] = {
    "small heads": {"layers": 12, "pairs": 40, "linear": {}},
    "real heads": {
        "layers": 8,
        "pairs": 20,
        "linear": {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
        },
    },
}
"""Models by name, and rounds for them; `linear` is what their linear layers have of their own."""

_DRAWS = 2000
_ADMIT = {"always": "first", "second": "second"}
"""Stores by name, and when they admit what an engine offers."""

_KINDS = ["off", *_ADMIT]
_STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 29), "MALLOC_MMAP_THRESHOLD_": str(1 << 28)}
"""Keeps glibc from giving memory back after every layer and faulting it in again.

Whether it does depends on how the heap happens to lie; it is a tenth of a prefill's CPU, and more
than what is looked for.
"""


def zero_reuse_overhead(quick: bool) -> Field:
    """CPU of engine and store for prompts that share nothing, with the store and without.

    The model is random: 12 layers of width 1024, 89 M parameters, float32 on CPU. The smaller the
    model, the dearer the store looks beside it. It runs on one thread, since two spin while they
    wait for each other, and that counts as CPU time. Without the store means mode `off`, a plain
    prefill: lookup, states kept on the way, notes of hiddens and decays, and the storing are all on
    the other side. One process runs all prompts, two of each kind in a round, in an order that a
    drift does not favour; a pair is what they cost with a store, and without, in one round. Beside
    the default stands a store that admits on second sighting.
    """
    return _overhead(quick, "small heads", _STEADY_HEAP)


def zero_reuse_real_heads(quick: bool) -> Field:
    """As `zero_reuse_overhead`, on layers as dear beside their calls as those of real models.

    8 layers of width 1024 whose linear ones have 16 heads of 128, as Qwen3.5's have: the calls that
    stopping a layer takes, for the state at the last page, stand beside more work.
    """
    return _overhead(quick, "real heads", _STEADY_HEAP)


def zero_reuse_default_heap(quick: bool) -> Field:
    """As `zero_reuse_overhead`, in an engine whose glibc gives memory back as it likes."""
    return {**_overhead(quick, "small heads", {}), "bar": None, "ok": None}


def _overhead(quick: bool, shape: str, environment: dict[str, str]) -> Field:
    pairs = 3 if quick else _SHAPES[shape]["pairs"]
    with _stores(shape, environment) as (stores, engine):
        costs = _rounds(stores, engine, pairs)
        parameters = engine.facts["parameters"]
    figures = {name: overhead_figures(costs, name) for name in _ADMIT}
    value = figures["always"]["value"]
    return {
        "bar": "<= 0.03",
        "ok": value <= 0.03,
        "pairs": pairs,
        "prompt_tokens": _PROMPT_TOKENS,
        "parameters": parameters,
        **figures["always"],
        "second_sighting": figures["second"],
    }


@contextmanager
def _stores(shape: str, environment: dict[str, str]) -> Iterator[tuple[dict[str, Child], Child]]:
    """A store of each kind, and an engine that knows them."""
    with ExitStack() as children:
        folder = children.enter_context(tempfile.TemporaryDirectory(prefix="tailreplay-bench-"))
        stores = {
            name: children.enter_context(
                closing(
                    Child(
                        "store",
                        listen=f"unix://{folder}/{name}.sock",
                        pool_bytes=1 << 30,
                        admit=admit,
                    )
                )
            )
            for name, admit in _ADMIT.items()
        }
        addresses = {name: store.facts["address"] for name, store in stores.items()}
        engine = Child("engine", environment=environment, addresses=addresses, shape=shape)
        yield stores, children.enter_context(closing(engine))


def _rounds(stores: dict[str, Child], engine: Child, pairs: int) -> Costs:
    """CPU seconds of each round's two prompts, by who uses them: `engine off`, `always always`, ...

    The first word is a process, the second what its prompts were asked with.
    """
    processes = {"engine": engine, **stores}
    costs: Costs = {f"{process} {kind}": [] for process in processes for kind in _KINDS}
    prompts = count()
    for kind in _KINDS * 2:
        engine.ask("run", number=next(prompts), store=kind)
    for pair in range(pairs):
        spent = dict.fromkeys(costs, 0.0)
        for kind in order(pair):
            before = {name: cpu_s(process.pid) for name, process in processes.items()}
            engine.ask("run", number=next(prompts), store=kind)
            for name, process in processes.items():
                spent[f"{name} {kind}"] += cpu_s(process.pid) - before[name]
        for name, seconds in spent.items():
            costs[name].append(seconds)
    return costs


def order(pair: int) -> list[str]:
    """How a round's prompts are asked; what grows from prompt to prompt falls on all alike."""
    first = pair % len(_KINDS)
    there = [*_KINDS[first:], *_KINDS[:first]]
    return [*there, *reversed(there)]


def overhead_figures(costs: Costs, store: str) -> Field:
    """What a store adds to its engine's prompts, of what they cost without; half a round each."""

    def both(kind: str) -> list[float]:
        pairs = zip(costs[f"engine {kind}"], costs[f"{store} {kind}"], strict=True)
        return [sum(pair) for pair in pairs]

    with_store, without = both(store), both("off")
    ratios = [on / off - 1 for on, off in zip(with_store, without, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "value": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "interval_95": _interval_of_median(ratios),
        "off_cpu_s": statistics.median(without) / 2,
        "exact_cpu_s": statistics.median(with_store) / 2,
        "more_in_engine_s": _more(costs, "engine", store),
        "more_in_store_s": _more(costs, store, store),
    }


def _more(costs: Costs, process: str, store: str) -> float:
    """What a prompt costs a process more than without the store: a median of differences."""
    pairs = zip(costs[f"{process} {store}"], costs[f"{process} off"], strict=True)
    return statistics.median((on - off) / 2 for on, off in pairs)


def _interval_of_median(values: list[float]) -> tuple[float, float]:
    """95% interval, from medians of values drawn again and again with repetition."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    outside = _DRAWS // 40  # 2.5% on each side
    return medians[outside], medians[-outside - 1]


def engine_child(addresses: dict[str, str], shape: str) -> None:
    """Role of an engine: `run` prefills a new prompt and waits until it has been stored.

    It has a client for each store, by its name; `off` is mode `off`.
    """
    import torch
    from tiny_models import LINEAR_LAYERS, random_tokens, tiny_qwen

    from store_parts.children import Answer, answer_commands
    from tailreplay.connector.hf import CachePolicy, HybridEngine

    torch.set_num_threads(1)
    layers, linear = _SHAPES[shape]["layers"], LINEAR_LAYERS | _SHAPES[shape]["linear"]
    model = tiny_qwen(layers=layers, hidden=_WIDTH, vocab=_VOCAB, linear=linear)
    engines = {n: HybridEngine(model, to, weights_id="bench") for n, to in addresses.items()}
    plain, off = next(iter(engines.values())), CachePolicy(mode="off")

    def run(number: int, store: str) -> Answer:
        prompt = random_tokens(_PROMPT_TOKENS, seed=number, vocab=_VOCAB).tolist()
        engine = engines.get(store, plain)
        policy = CachePolicy(mode="exact") if store in engines else off
        report = engine.generate(prompt, 1, policy=policy).report
        engine.flush()
        return {"mode": report["mode"], "matched_tokens": report["matched_tokens"]}

    gc.collect()
    gc.freeze()  # else a collection of what the libraries have made falls on some prompts
    try:
        parameters = sum(p.numel() for p in model.parameters())
        answer_commands({"pid": os.getpid(), "parameters": parameters}, {"run": run})
    finally:
        for engine in engines.values():
            engine.close()
