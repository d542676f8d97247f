"""What is measured of one engine, and of two beside each other."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_engine import Engine

VOCAB = 512
LENGTH = 2200
SHARED = (1600, 1500)
TURNS = 10
ANSWER, NEW = 100, 40


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def shared_prefix(engine: Engine, prompts: int) -> dict[str, Any]:
    """Prompts that share the first part of one prompt, which the engine has seen."""
    base = tokens(LENGTH, seed=0)
    engine.timed(prompts=[base])
    found = {}
    for shared in SHARED:
        # The token behind the shared ones differs from the base's in every prompt.
        batch = []
        for n in range(prompts):
            rest = tokens(LENGTH - shared, seed=1000 * shared + n)
            rest[0] = (base[shared] + 1 + n) % VOCAB
            batch.append(base[:shared] + rest)
        run = engine.timed(prompts=batch)
        spared = [c - a for c, a in zip(run["cached"], run["again"], strict=True)]
        found[str(shared)] = {
            "prompts": prompts,
            "hits": sum(s > 0 for s in spared),
            "spared_all": sum(s == shared for s in spared),
            "spared_tokens": sorted(set(spared)),
            "miss_reasons": sorted({r for r in run["reasons"] if r}),
            "first_ms": round(1000 * run["ttft_s"][0], 1),
            "ttft_ms": round(1000 * statistics.median(run["ttft_s"][1:]), 1),
            "cpu_s": round(run["cpu_s"], 2),
            "loaded_mib": {t: round(size / (1 << 20), 2) for t, size in run["bytes"].items()},
        }
    return found


def chat(engine: Engine) -> dict[str, Any]:
    """A conversation that grows by an answer and a question a turn."""
    prompt, prefilled = tokens(400, seed=7), []
    loaded: Counter[str] = Counter()
    for turn in range(TURNS):
        found = engine.generate(prompts=[prompt], tokens=ANSWER)[0]
        report = found["report"] or {}
        prefilled.append(len(prompt) - found["cached"] + report.get("recomputed_tokens", 0))
        for tier, sizes in report.get("bytes", {}).items():
            loaded[tier] += sum(sizes.values())
        prompt = prompt + found["tokens"] + tokens(NEW, seed=100 + turn)
    mib = {tier: round(size / (1 << 20), 2) for tier, size in loaded.items()}
    told = {"answer": ANSWER, "new": NEW, "prefilled": prefilled[1:], "loaded_mib": mib}
    return {"chat": told}


def pool_pairs(with_pool: Engine, without: Engine, pairs: int) -> dict[str, Any]:
    """Hits of 1600 tokens with states stored, with the GPU tier beside without it.

    Both have all they could have; seconds to the first token and CPU seconds of engine and store.
    """
    ratios: dict[str, list[float]] = {"ttft_s": [], "engine_cpu_s": [], "store_cpu_s": []}
    base, shared = tokens(LENGTH, seed=0), SHARED[0]
    for pair in range(pairs + 1):
        batch = [base[:shared] + tokens(20, seed=10**7 + 8 * pair + n) for n in range(8)]
        order = [(with_pool, "with"), (without, "without")]
        seen: dict[str, dict[str, float]] = {}
        for engine, name in order if pair % 2 else order[::-1]:
            before_s = time.process_time()
            run = engine.timed(prompts=batch)
            seen[name] = {
                "ttft_s": statistics.median(run["ttft_s"]),
                "engine_cpu_s": run["cpu_s"],
                "store_cpu_s": time.process_time() - before_s,
            }
        if pair:  # the first fills both
            for what, values in ratios.items():
                values.append(seen["with"][what] / seen["without"][what])
    return {what: round(statistics.median(values), 3) for what, values in ratios.items()}


def overhead(
    with_connector: Engine, without: Engine, pairs: int, *, prompts: int, answer: int
) -> dict[str, Any]:
    """CPU seconds of prompts that share nothing, with the connector over without it."""
    ratios, store_s = [], 0.0
    for pair in range(pairs):
        batch = [tokens(LENGTH, seed=10**6 * answer + pair * prompts + n) for n in range(prompts)]
        order = [(with_connector, "with"), (without, "without")]
        cpu_s = {}
        for engine, name in order if pair % 2 else order[::-1]:
            before_s = time.process_time()
            cpu_s[name] = engine.timed(prompts=batch, tokens=answer)["cpu_s"]
            store_s += time.process_time() - before_s
        ratios.append(cpu_s["with"] / cpu_s["without"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "pairs": pairs,
        "prompts_each": prompts,
        "answer_tokens": answer,
        "median": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "interval_95": [round(x, 3) for x in _interval_of_median(ratios)],
        "store_cpu_s": round(store_s, 2),
    }


def _interval_of_median(values: list[float]) -> tuple[float, float]:
    """95% interval, from medians of values drawn again and again with repetition."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]
