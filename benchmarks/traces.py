"""What a small pool saves on recorded workloads: the store's order of eviction, and plain LRU.

    python -P benchmarks/traces.py --json            # six minutes
    python -P benchmarks/traces.py --json --trace magentic

The store's own catalog, index and evictor and the connector's own planner run; payload is counted,
not held, with sizes of Qwen3-Next 80B. Requests follow each other, 50 sessions of `tau` taking
turns; nothing is said about time. Fields, by trace, policy of the engine and pool:

- hit: tokens used of a stored prefix, of all prompt tokens.
- work: FLOPs of prefill and replay, of those of prefilling everything.
- lru_hit, lru_work: the same where every use counts alike, whatever the object.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

GIB = 1 << 30
POOLS_GIB = {"tau": (2, 4, 8), "magentic": (1, 2)}


def main() -> None:
    from traces_parts.replica import ENGINES
    from traces_parts.requests import TRACES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", choices=TRACES, action="append", help="default: all")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: all")
    parser.add_argument("--pool-gib", type=float, action="append", help="default: 1, 2 or 2, 4, 8")
    parser.add_argument("--sessions", type=int, default=50, help="that take turns, in tau")
    options = parser.parse_args()

    began = time.process_time()
    figures: dict[str, Any] = {}
    for trace in options.trace or TRACES:
        for engine in options.engine or ENGINES:
            for pool_gib in options.pool_gib or POOLS_GIB[trace]:
                found = both(trace, engine, pool_gib, options.sessions)
                figures.setdefault(trace, {}).setdefault(engine, {})[f"{pool_gib:g} GiB"] = found
                if not options.json:
                    print(f"{trace:9} {engine:14} {pool_gib:4g} GiB  {found}", flush=True)
    if options.json:
        cpu_s = round(time.process_time() - began, 1)
        print(json.dumps({"traces": figures, "cpu_s": cpu_s}, indent=2))


def both(trace: str, engine: str, pool_gib: float, sessions: int) -> dict[str, float]:
    """Figures of the store and of LRU on one workload."""
    from traces_parts.replica import LruCatalog, served
    from traces_parts.requests import prompts

    from tailreplay.store.catalog import Catalog

    ours, lru = (
        served(prompts(trace, sessions), engine, kind(None), int(pool_gib * GIB))
        for kind in (Catalog, LruCatalog)
    )
    return {**ours, **{f"lru_{name}": value for name, value in lru.items()}}


if __name__ == "__main__":
    main()
