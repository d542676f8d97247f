"""What the store must show, each figure beside its limit and its peers, as one JSON object.

    python -P benchmarks/store.py --json
    python -P benchmarks/store.py --json --only match_p99_ms,fill_5x
    python -P benchmarks/store.py --json --quick

benchmarks/README.md says what each field is and how the peers are installed.
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# -P keeps this folder off the path, so that nothing in it shadows an installed package. Its parts
# and the helpers of the tests are found after everything else; children come through here too.
_ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(_ROOT / "benchmarks"), str(_ROOT / "tests")]

ROLES = {
    "memcpy": "store_parts.floor.memcpy_child",
    "raw": "store_parts.floor.raw_child",
    "raw_server": "store_parts.floor.raw_server_child",
    "ours": "store_parts.ours.ours_child",
    "store": "store_parts.ours.store_child",
    "bulk_reader": "store_parts.load.bulk_reader_child",
    "putter": "store_parts.load.putter_child",
    "delay": "store_parts.look_ahead.delay_child",
    "engine": "store_parts.engine.engine_child",
    "index_weight": "store_parts.synthetic.index_weight_child",
    "redhare_provider": "store_parts.peers.redhare_provider_child",
    "mooncake_provider": "store_parts.peers.mooncake_provider_child",
}
"""What a child process can be, and the function that is it."""
_PEER_ROLES = ("redhare", "mooncake", "redis_py", "lm", "lmcache_server")


def fields() -> dict[str, Callable[[bool], dict[str, Any]]]:
    """Every field by name, as a function of whether to be quick."""
    from store_parts.engine import (
        zero_reuse_default_heap,
        zero_reuse_overhead,
        zero_reuse_real_heads,
    )
    from store_parts.index import index_bytes_per_block, match_p99_ms
    from store_parts.load import fill_5x, fill_5x_redis, urgent_behind_bulk_ratio
    from store_parts.look_ahead import look_ahead_ratio
    from store_parts.transfer import Remote, local_get_vs_memcpy

    remote = Remote()
    return {
        "local_get_vs_memcpy": local_get_vs_memcpy,
        "remote_get_vs_raw_socket": remote.get_vs_raw_socket,
        "remote_get_vs_best_peer": remote.get_vs_best_peer,
        "put_vs_best_peer": remote.put_vs_best_peer,
        "urgent_behind_bulk_ratio": urgent_behind_bulk_ratio,
        "look_ahead_ratio": look_ahead_ratio,
        "match_p99_ms": match_p99_ms,
        "zero_reuse_overhead": zero_reuse_overhead,
        "zero_reuse_real_heads": zero_reuse_real_heads,
        "zero_reuse_default_heap": zero_reuse_default_heap,
        "index_bytes_per_block": index_bytes_per_block,
        "fill_5x": fill_5x,
        "fill_5x_redis": fill_5x_redis,
    }


def main() -> None:
    """Measures the fields asked for and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--only", help="fields to measure, with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument("--child", nargs=2, metavar=("ROLE", "SETTINGS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _be(*arguments.child)
        return
    known = fields()
    wanted = arguments.only.split(",") if arguments.only else list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"no field {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    report: dict[str, Any] = {"quick": arguments.quick, "cores": os.cpu_count()}
    for name in wanted:
        started_s = time.perf_counter()
        if name.startswith("zero_reuse") and not arguments.only:
            note = f"not measured here: it takes minutes; --only {name}"
            report[name] = {"value": None, "ok": None, "note": note}
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            report[name] = known[name](arguments.quick)
        except Exception as error:  # noqa: BLE001 - one field that fails must not hide the others
            traceback.print_exc()
            report[name] = {"value": None, "ok": False, "fault": f"{type(error).__name__}: {error}"}
        report[name]["seconds"] = round(time.perf_counter() - started_s, 1)
        report[name]["load_average"] = os.getloadavg()[0]
    json.dump(_rounded(report), sys.stdout, indent=1)
    print()


def _be(role: str, settings: str) -> None:
    """What a child process runs."""
    from store_parts.children import keep_stdout_clean

    keep_stdout_clean()
    if role in _PEER_ROLES:
        module, function, more = "store_parts.peers", "peer_child", {"kind": role}
    else:
        module, _, function = ROLES[role].rpartition(".")
        more = {}
    getattr(importlib.import_module(module), function)(**more, **json.loads(settings))


def _rounded(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
