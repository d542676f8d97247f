"""Whether puts over a Unix socket cost less through a staging segment: CPU time of both ends.

Stores that differ in `staging_bytes` alone take the same objects in turns, from one client.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(_ROOT / "benchmarks"), str(_ROOT / "tests")]

from store_parts.children import Child, cpu_s  # noqa: E402
from store_parts.contender import objects  # noqa: E402
from store_parts.ours import KV_BLOCK_TOKENS, Prompt, block_geometry, connected  # noqa: E402

MIB = 1 << 20
STAGING_MIB = (0, 4, 16)
SHAPES = ((64, 1), (16, 8))
"""Objects of a put, and MiB of each."""


def measure(count: int, object_mib: int, rounds: int) -> dict[str, object]:
    """CPU ms per MiB for each size of the segment, and its ratio to none, round by round."""
    blob, geometry = objects(count, object_mib * MIB), block_geometry(object_mib * MIB)
    pool_bytes = int(blob.nbytes * 2.2) + 64 * MIB
    spent: dict[int, list[float]] = {size: [] for size in STAGING_MIB}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailreplay-bench-"))
        stores, clients = {}, {}
        for size in STAGING_MIB:
            listen = f"unix://{folder}/{size}.sock"
            stores[size] = stack.enter_context(
                closing(
                    Child("store", listen=listen, pool_bytes=pool_bytes, staging_bytes=size * MIB)
                )
            )
            clients[size] = stack.enter_context(closing(connected(listen)))
        for number in range(rounds + 1):
            prompt = Prompt(number, count * KV_BLOCK_TOKENS)
            for size in STAGING_MIB if number % 2 else STAGING_MIB[::-1]:
                before_s = cpu_s(os.getpid(), stores[size].pid)
                answer = prompt.put(clients[size], geometry, blob)
                assert answer.stored == count, f"{answer} for {count} objects"
                spent[size].append(cpu_s(os.getpid(), stores[size].pid) - before_s)
    mib = blob.nbytes / MIB
    return {
        f"staging_{size}_mib": {
            "cpu_ms_per_mib": round(statistics.median(spent[size][1:]) * 1e3 / mib, 3),
            "ratio_to_sent": round(
                statistics.median(
                    staged / sent
                    for staged, sent in zip(spent[size][1:], spent[0][1:], strict=True)
                ),
                3,
            ),
        }
        for size in STAGING_MIB
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="on one line")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    found = {
        f"{count}_objects_of_{mib}_mib": measure(count, mib, asked.rounds) for count, mib in SHAPES
    }
    print(json.dumps(found, indent=None if asked.json else 2))


if __name__ == "__main__":
    main()
