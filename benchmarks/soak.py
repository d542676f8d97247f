"""Hit rate and memory of one store over hours of more prompts than it has room for.

    python -P benchmarks/soak.py --minutes 180 --json            # a period is a tenth of it
    python -P benchmarks/soak.py --minutes 3 --json              # to see that it runs

With --redis the store has a Redis of its own behind it, of which it keeps a part in memory.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(_ROOT / "benchmarks"), str(_ROOT / "tests")]

PERIODS = 10
_REQUESTS = 200


def main() -> None:
    """Serves requests until the time is over and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--pool-mib", type=int, default=64)
    parser.add_argument("--redis", action="store_true")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # as `serve` does, before it is imported
    from redis_server import RedisServer
    from soak_load import Soak
    from store_parts.children import rss_bytes

    from tailreplay.store import serve_in_thread

    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"pool_bytes": arguments.pool_mib << 20}
        if arguments.redis:
            settings["redis_url"] = stack.enter_context(contextlib.closing(RedisServer())).url
        store = stack.enter_context(serve_in_thread(**settings)).store
        # Twice as many prompts as there is room for: 64 KiB each.
        soak = Soak(store, os.urandom(32), prompts=arguments.pool_mib * 32, seed=1)
        periods = []
        for _ in range(PERIODS):
            periods.append(_period(soak, arguments.minutes * 60 / PERIODS))
            periods[-1]["rss_mib"] = rss_bytes(os.getpid()) / (1 << 20)
        stats = store.stats()
    first, last = periods[1], periods[-1]  # the first of all begins with an empty store
    report = {
        "value": last["hit_rate"] - first["hit_rate"],
        "bar": "within 0.02 of 0",
        "ok": abs(last["hit_rate"] - first["hit_rate"]) <= 0.02,
        "rss_grew_mib": last["rss_mib"] - first["rss_mib"],
        "evicted_pools": stats.evicted_bytes / stats.pool_bytes,
        "wrong": sum(period["wrong"] for period in periods),
        "integrity_errors": stats.integrity_errors,
        "dropped_objects": stats.dropped_objects,
        "left_pinned_bytes": stats.pinned_bytes,
        "periods": periods,
    }
    print(json.dumps(report, indent=1), file=out)


def _period(soak: Any, seconds: float) -> dict[str, Any]:  # noqa: ANN401 - a helper of the tests
    queried = loaded = requests = wrong = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        rate = soak.serve(soak.requests(_REQUESTS))
        queried, loaded, wrong = queried + rate.queried, loaded + rate.loaded, wrong + rate.wrong
        requests += _REQUESTS
    return {"hit_rate": loaded / queried, "requests": requests, "wrong": wrong}


if __name__ == "__main__":
    main()
