"""One engine process of the demo: reads a request per line of JSON, answers with a line.

A request is {"model": name, "tokens": [...], "policy": {...}, "compare": bool}; with `compare` the
same prompt is prefilled once more without the store, for the time and the logits of a cold run.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, get_args

import torch

from tailreplay.connector.demo_model import Name, miniature
from tailreplay.connector.hf import CachePolicy, HybridEngine

if TYPE_CHECKING:
    from torch import Tensor

_NEW_TOKENS = 8


def answer(engine: HybridEngine, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one request; `largest_difference` is max|a - b| / max|b| of the first logits."""
    # Deadlines and what a load may take are for servers; the demo also runs on busy machines.
    patient = {"match_timeout_s": 5.0, "weigh_time": False}
    policy = CachePolicy.model_validate({**patient, **request["policy"]})
    out = engine.generate(request["tokens"], _NEW_TOKENS, policy=policy)
    stored = engine.flush()
    result: dict[str, Any] = {"report": out.report, "tokens": out.tokens, "stored": stored}
    if request.get("compare"):
        cold = engine.generate(request["tokens"], _NEW_TOKENS, policy=CachePolicy(mode="off"))
        result |= {
            "cold_ttft_s": cold.report["ttft_s"],
            "cold_tokens": cold.tokens,
            "largest_difference": largest_difference(out.first_logits, cold.first_logits),
        }
    return result


def largest_difference(logits: Tensor, reference: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((logits - reference).abs().max() / reference.abs().max())


def main() -> None:
    """Serves standard input until it ends."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(HybridEngine(miniature(name), sys.argv[1]))
            for name in get_args(Name)
        }
        # The first forward in a process is slow; it is no part of what is shown.
        for engine in engines.values():
            engine.generate([0] * 128, 2, policy=CachePolicy(mode="off"))
        sys.stdout.write('{"ready": true}\n')
        sys.stdout.flush()
        for line in sys.stdin:
            request = json.loads(line)
            sys.stdout.write(json.dumps(answer(engines[request["model"]], request)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
