"""Aborts, preemptions, a store that comes late, our own faults: nothing is left, nobody fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_models import qwen35
from vllm_prompts import branch, tokens, worst
from waiting import until

from tailreplay.store import serve_in_thread

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_case_50_an_abort_while_loading_leaves_no_block_and_no_lease(
    eager: Any, gate: Any, store: Any
):
    prompt = tokens(1400, seed=9)
    eager.generate(prompts=[prompt])
    eager.generate(prompts=[branch(prompt, 600)])
    free = eager.free_blocks()
    gate.close()
    names = [eager.load_begins(prompt=branch(prompt, m)) for m in (700, 800)]
    assert eager.free_blocks() < free
    eager.abort(names=names)
    assert eager.free_blocks() == free
    gate.open()
    assert eager.generate(prompts=[branch(prompt, 900)])[0]["cached"] == 900
    assert eager.free_blocks() == free
    until(lambda: not store.store.stats().leases)


@pytest.mark.parametrize(
    "state", ["asked", "answered", "loading", "fetched", "filling", "decoding"]
)
def test_case_49_an_abort_in_any_state_leaves_nothing(
    eager: Any, gate: Any, store: Any, state: str
):
    prompt = tokens(1400, seed=len(state))
    eager.generate(prompts=[prompt], cache_salt=state)
    # Leaves a state to load; the gap behind it is longer than one step may close.
    eager.generate(prompts=[branch(prompt, 100, turn=2)], cache_salt=state)
    free = eager.free_blocks()
    if state in ("loading", "fetched"):
        gate.close()
    name = eager.begin(
        prompt=branch(prompt, 1234),
        state="loading" if state == "fetched" else state,
        cache_salt=state,
    )
    if state == "fetched":
        gate.open()
        assert eager.bytes_are_here()
    eager.abort(names=[name])
    gate.open()
    assert eager.generate(prompts=[branch(prompt, 900)], cache_salt=state)[0]["cached"] == 900
    assert eager.left_over() == 0
    assert eager.free_blocks() == free
    until(lambda: not store.store.stats().leases)


def first_hit(
    engine: Any, prompts: Iterator[list[int]], cached: int
) -> tuple[list[int], dict[str, Any]]:
    """The first prompt of which so much is cached, and its answer.

    At first the connector's breaker may be open, and a busy machine may miss a deadline; how long
    that may go on is the test's own timeout.
    """
    for prompt in prompts:
        found = engine.generate(prompts=[prompt])[0]
        if found["cached"] == cached:
            return prompt, found
    raise AssertionError("no prompt hits")


def test_case_65_and_67_a_store_that_is_absent_and_comes_late_is_found(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    address = f"unix://{tmp_path_factory.mktemp('late')}/store.sock"
    small = qwen35(tmp_path_factory.mktemp("small"), layers=4)
    quick = {"put_timeout_s": 1.0, "match_timeout_s": 0.25}
    compiled = start(address, enforce_eager=False, model=small, connector=quick)
    prompt = tokens(1000, seed=13)
    missed = compiled.generate(prompts=[prompt])[0]
    assert missed["report"]["miss_reason"] in ("store_down", "deadline")
    with serve_in_thread(pool_bytes=64 << 20, listen=address):
        first_hit(compiled, itertools.repeat(branch(prompt, 900)), 999)
        # Another end each time, or it would find what it has left itself.
        others = (branch(prompt, 333, turn=n) for n in itertools.count(1))
        asked, hit = first_hit(compiled, others, 333)
        plain = compiled.generate(prompts=[asked], mode="off")[0]
        assert worst([hit], [plain]) < 0.3
    after = compiled.generate(prompts=[asked])[0]
    assert after["cached"] == 0
    assert worst([after], [plain]) < 0.3


def test_case_52_a_request_preempted_a_hundred_times_ends_as_one_that_was_not(eager: Any):
    prompt = tokens(500, seed=24)
    alone = eager.generate(prompts=[prompt])
    free = eager.free_blocks()
    assert eager.preemptions() == 0
    found = eager.preempt(prompt=prompt, times=100)
    assert eager.preemptions() == 100
    assert len(found["tokens"]) == 300
    assert worst([found], alone) < 0.3
    assert eager.free_blocks() == free


def test_preempted_requests_come_back_and_hit(start: Callable[..., Any]):
    cramped = start(num_gpu_blocks_override=20, max_num_batched_tokens=512, max_model_len=2048)
    prompt = tokens(700, seed=14)
    prompts = [branch(prompt, m, 60) for m in (400, 450, 500, 550)]
    alone = [cramped.generate(prompts=[p], mode="off", tokens=4)[0] for p in prompts]
    cramped.generate(prompts=[prompt])
    free = cramped.free_blocks()
    done = cramped.generate(prompts=prompts, tokens=300)
    assert cramped.preemptions() > 0
    assert [len(d["tokens"]) for d in done] == [300] * 4
    assert worst(done, alone) < 0.3
    assert cramped.free_blocks() == free


def test_a_fault_in_storing_fails_no_request_and_is_told_once(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    engine = start(model=qwen35(tmp_path_factory.mktemp("broken"), layers=4))
    prompts = [tokens(300, seed=seed) for seed in (50, 51, 52)]
    sound = [engine.generate(prompts=[p], tokens=70, mode="off")[0]["tokens"] for p in prompts]
    for part in ("sent", "taken"):
        getattr(engine, "break_sending" if part == "sent" else "break_taking")()
        found = [engine.generate(prompts=[p], tokens=70)[0] for p in prompts]
        assert [one["tokens"] for one in found] == sound
        assert {one["cached"] for one in found} == {0}
    assert engine.left_over() == 0
    assert engine.metric(name="vllm:tailreplay_failed_puts", reason="fault") >= 2 * len(prompts)
    log = engine.log.read_text()
    assert log.count("KeyError") == log.count("a prompt was not sent") == 1
    assert log.count("rows were not taken") == log.count("the end of an answer was not") == 1
    assert log.count("AttributeError: 'NoneType'") == 2
