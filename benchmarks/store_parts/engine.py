"""What sharing costs an engine that never gets anything back."""

import os
import statistics
import sys
import tempfile
from typing import Any

from store_parts.children import Child, cpu_s

Field = dict[str, Any]

_PROMPT_TOKENS = 1024


def zero_reuse_overhead(quick: bool) -> Field:
    """CPU of engine and store for prompts that share nothing, with the store and without.

    The model is random: 8 layers of width 512, 18 M parameters, float32 on CPU. The smaller the
    model, the dearer the store looks beside it. Beside the default stands a store that admits on
    second sighting.
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
        "second_sighting": _overhead(pairs, "second"),
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
            for number in range(1, pairs + 1):
                order = ("off", "exact") if number % 2 else ("exact", "off")
                for mode in order:
                    before = cpu_s(store.pid, engine.pid)
                    engine.ask("run", number=number * 2 + (mode == "exact"), mode=mode)
                    costs[mode].append(cpu_s(store.pid, engine.pid) - before)
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
        "off_cpu_s": statistics.median(costs["off"]),
        "exact_cpu_s": statistics.median(costs["exact"]),
        "parameters": parameters,
    }


def engine_child(address: str) -> None:
    """Role of an engine: `run` prefills a new prompt and waits until it has been stored."""
    import torch
    from tiny_models import random_tokens, tiny_qwen

    from store_parts.children import Answer, answer_commands
    from tailreplay.connector.hf import CachePolicy, HybridEngine

    torch.set_num_threads(2)
    model = tiny_qwen(layers=8, hidden=512, vocab=4096)
    engine = HybridEngine(model, address, weights_id="bench")

    def run(number: int, mode: Any) -> Answer:  # noqa: ANN401 - a mode's name
        prompt = random_tokens(_PROMPT_TOKENS, seed=number, vocab=4096).tolist()
        report = engine.generate(prompt, 1, policy=CachePolicy(mode=mode)).report
        engine.flush()
        return {"matched_tokens": report["matched_tokens"]}

    try:
        parameters = sum(p.numel() for p in model.parameters())
        answer_commands({"pid": os.getpid(), "parameters": parameters}, {"run": run})
    finally:
        engine.close()
