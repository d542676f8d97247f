"""A vLLM engine in a process of its own: reads one JSON command a line, answers one a line.

Run as `python -P vllm_child.py '<engine arguments>'`. Scheduler and, with one rank, worker live in
this process, so that tests can look into both.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


class Child:
    def __init__(self, **arguments: Any) -> None:
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.number = 0

    def add(self, prompt: list[int], tokens: int = 8, **params: Any) -> str:
        extra = {}
        if "mode" in params:
            extra = {"kv_transfer_params": {"tailreplay": {"mode": params.pop("mode")}}}
        else:
            extra = {"kv_transfer_params": {"tailreplay": {}}}
        salt = params.pop("cache_salt", None)
        self.number += 1
        name = f"r{self.number}"
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.engine.add_request(name, inputs, sampling, **params)
        return name

    def run(self, limit_s: float = 60.0) -> dict[str, Any]:
        """Steps until nothing is left to do; the outputs by request."""
        done: dict[str, Any] = {}
        end_s = time.monotonic() + limit_s
        while self.engine.has_unfinished_requests() and time.monotonic() < end_s:
            for out in self.engine.step():
                if out.finished:
                    done[out.request_id] = {
                        "tokens": list(out.outputs[0].token_ids),
                        "cached": out.num_cached_tokens,
                        "report": (out.kv_transfer_params or {}).get("tailreplay"),
                        "finish": out.outputs[0].finish_reason,
                    }
        return done

    def generate(self, prompts: list[list[int]], tokens: int = 8, **params: Any) -> list[Any]:
        names = [self.add(prompt, tokens, **params) for prompt in prompts]
        done = self.run()
        self.settle()
        return [done.get(name) for name in names]

    def settle(self) -> None:
        """One more step for what follows a request's end, then until the store has it."""
        core = self.engine.engine_core.engine_core
        if core.scheduler.has_finished_requests():
            self.engine.step()
        for connector in self.connectors():
            keeper = connector._worker._keeper if connector._worker is not None else None
            if keeper is not None:
                keeper._sender.submit(lambda: None).result()

    def connectors(self) -> list[Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return [get_kv_transfer_group()] if has_kv_transfer_group() else []

    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("call")
        if name == "quit":
            break
        result = getattr(child, name)(**command)
        print(json.dumps(result), file=answers, flush=True)
    with contextlib.suppress(Exception):
        child.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
