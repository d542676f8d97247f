"""What sharing costs an engine that never gets anything back."""

import gc
import os
import random
import statistics
import sys
import tempfile
from typing import Any

from store_parts.children import Child, cpu_s

Field = dict[str, Any]

_PROMPT_TOKENS = 1024
_LAYERS, _WIDTH, _VOCAB = 12, 1024, 4096
_DRAWS = 2000
_ORDERS = (("off", "exact", "exact", "off"), ("exact", "off", "off", "exact"))


def zero_reuse_overhead(quick: bool) -> Field:
    """CPU of engine and store for prompts that share nothing, with the store and without.

    The model is random: 12 layers of width 1024, 89 M parameters, float32 on CPU. The smaller the
    model, the dearer the store looks beside it. It runs on one thread, since two spin while they
    wait for each other, and that counts as CPU time. Without the store means mode `off`, a plain
    prefill: lookup, states kept on the way, notes of hiddens and decays, and the storing are all on
    the other side. A pair is two prompts of each, in an order that a drift does not favour. Beside
    the default stands a store that admits on second sighting.
    """
    pairs = 3 if quick else 20
    figures = _overhead(pairs, "first")
    value = figures["value"]
    return {
        "bar": "<= 0.03",
        "ok": value <= 0.03,
        "pairs": pairs,
        "prompt_tokens": _PROMPT_TOKENS,
        **figures,
        "second_sighting": _overhead(pairs // 2 + 1, "second"),
    }


def _overhead(pairs: int, admit: str) -> Field:
    with tempfile.TemporaryDirectory(prefix="tailreplay-bench-") as folder:
        listen = f"unix://{folder}/store.sock"
        store = Child("store", listen=listen, pool_bytes=1 << 30, admit=admit)
        engine = None
        try:
            engine = Child("engine", python=sys.executable, address=store.facts["address"])
            engine.ask("run", number=0, mode="exact")
            costs: dict[str, list[float]] = {"off": [], "exact": []}
            prompts = iter(range(1, 4 * pairs + 1))
            for pair in range(pairs):
                spent = dict.fromkeys(costs, 0.0)
                for mode in _ORDERS[pair % 2]:
                    before = cpu_s(store.pid, engine.pid)
                    engine.ask("run", number=next(prompts), mode=mode)
                    spent[mode] += cpu_s(store.pid, engine.pid) - before
                for mode, cpu in spent.items():
                    costs[mode].append(cpu)
            parameters = engine.facts["parameters"]
        finally:
            for child in (engine, store):
                if child is not None:
                    child.close()
    ratios = [on / off - 1 for on, off in zip(costs["exact"], costs["off"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "value": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "interval_95": _interval_of_median(ratios),
        "off_cpu_s": statistics.median(costs["off"]) / 2,
        "exact_cpu_s": statistics.median(costs["exact"]) / 2,
        "parameters": parameters,
    }


def _interval_of_median(values: list[float]) -> tuple[float, float]:
    """95% interval, from medians of values drawn again and again with repetition."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    outside = _DRAWS // 40  # 2.5% on each side
    return medians[outside], medians[-outside - 1]


def engine_child(address: str) -> None:
    """Role of an engine: `run` prefills a new prompt and waits until it has been stored."""
    import torch
    from tiny_models import random_tokens, tiny_qwen

    from store_parts.children import Answer, answer_commands
    from tailreplay.connector.hf import CachePolicy, HybridEngine

    torch.set_num_threads(1)
    model = tiny_qwen(layers=_LAYERS, hidden=_WIDTH, vocab=_VOCAB)
    engine = HybridEngine(model, address, weights_id="bench")

    def run(number: int, mode: Any) -> Answer:  # noqa: ANN401 - a mode's name
        prompt = random_tokens(_PROMPT_TOKENS, seed=number, vocab=_VOCAB).tolist()
        report = engine.generate(prompt, 1, policy=CachePolicy(mode=mode)).report
        engine.flush()
        return {"matched_tokens": report["matched_tokens"]}

    gc.collect()
    gc.freeze()  # else a collection of what the libraries have made falls on some prompts
    try:
        parameters = sum(p.numel() for p in model.parameters())
        answer_commands({"pid": os.getpid(), "parameters": parameters}, {"run": run})
    finally:
        engine.close()
