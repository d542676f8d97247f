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

    def compare(
        self,
        prompt: list[int],
        cuts: list[int],
        noise_cuts: list[int],
        tokens: int = 24,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """A hit beside a prefill of the same prompt cut where the hit's history was cut.

        States are read from the engine's own cache after the last cut, in each case before the
        rest of the prompt runs. The engine's own noise is that between two ways of cutting.
        """
        reference = self._cut_prefill(prompt, cuts, tokens)
        other = self._cut_prefill(prompt, noise_cuts, tokens)
        hit = self._hit(prompt, tokens, cache_salt)
        return {
            "cached": hit["cached"],
            "report": hit["report"],
            "tokens_equal": hit["tokens"] == reference["tokens"],
            "state_error": _state_error(hit["states"], reference["states"]),
            "noise": _state_error(other["states"], reference["states"]),
            "error_to_noise_cuts": _state_error(hit["states"], other["states"]),
        }

    def _cut_prefill(self, prompt: list[int], cuts: list[int], tokens: int) -> dict[str, Any]:
        """A plain prefill, cut by the scheduler's own budget."""
        scheduler = self.scheduler()
        before = scheduler.max_num_scheduled_tokens
        name = self.add(prompt, tokens, mode="off")
        for first, end in zip([0, *cuts], cuts, strict=False):
            scheduler.max_num_scheduled_tokens = end - first
            self.engine.step()
        states = self._states(name, cuts[-1])
        scheduler.max_num_scheduled_tokens = before
        return self.run()[name] | {"states": states}

    def _hit(self, prompt: list[int], tokens: int, cache_salt: str | None) -> dict[str, Any]:
        name = self.add(prompt, tokens, cache_salt=cache_salt)
        scheduler = self.scheduler()
        inner = self._inner(name)
        end_s = time.monotonic() + 20
        while inner not in scheduler.finished_recving_kv_req_ids and time.monotonic() < end_s:
            self.engine.step()
        states = self._states(name, scheduler.requests[inner].num_computed_tokens)
        return self.run()[name] | {"states": states}

    def _states(self, name: str, tokens: int) -> dict[int, Any]:
        worker = self.connectors()[0]._worker
        block_ids = self.scheduler().kv_cache_manager.get_block_ids(self._inner(name))
        return worker._model.read_states(worker._model.state_blocks(block_ids, tokens))

    def _inner(self, name: str) -> str:
        """The id under which the scheduler knows a request."""
        return next(r for r in self.scheduler().requests if r == name or r.startswith(f"{name}-"))

    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler


def _state_error(got: dict[int, Any], wanted: dict[int, Any]) -> float:
    """Largest relative L2 distance over layers, conv and recurrent states alike."""
    errors = []
    for layer in wanted:
        for name in ("conv", "recurrent"):
            a, b = (getattr(x[layer], name).double() for x in (got, wanted))
            errors.append(((a - b).norm() / b.norm()).item())
    return max(errors)


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
