"""Hits at any token on real engines: what they begin with, and that nothing lowers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_models import qwen35
from vllm_prompts import branch, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

HIT_TOKENS = (65, 256, 257, 777, 1234)


@pytest.mark.parametrize("m", HIT_TOKENS)
def test_a_hit_at_any_token_is_bit_equal_to_a_prefill_cut_there(eager: Any, m: int):
    prompt = tokens(1400, seed=1)
    eager.generate(prompts=[prompt], cache_salt=f"cut{m}")
    found = eager.compare(
        prompt=branch(prompt, m), cuts=[m], noise_cuts=[m], salts=[f"cut{m}", "a", "b"]
    )
    assert found["cached"] == m
    assert found["report"]["mode"] == "exact"
    assert found["state_error"] == 0
    assert found["tokens_equal"]


def test_the_state_at_a_boundary_is_kept_for_the_next_hit(eager: Any):
    prompt = tokens(1400, seed=2)
    eager.generate(prompts=[prompt])
    first, second = (
        eager.generate(prompts=[branch(prompt, 777, turn=turn)])[0]["report"] for turn in (1, 2)
    )
    assert (first["recomputed_tokens"], first["checkpoint_token"]) == (777, 0)
    assert (second["recomputed_tokens"], second["checkpoint_token"]) == (0, 777)


def test_a_hit_from_a_stored_state_is_within_the_engines_own_noise(eager: Any):
    prompt = tokens(1400, seed=3)
    eager.generate(prompts=[prompt])
    eager.generate(prompts=[branch(prompt, 601)])
    found = eager.compare(
        prompt=branch(prompt, 1000), cuts=[601, 1000], noise_cuts=[1000], salts=["", "a", "b"]
    )
    assert found["report"]["checkpoint_token"] == 601
    assert found["state_error"] <= found["noise"]
    assert found["noise"] > 0


def test_eight_hits_of_eight_lengths_in_one_step(eager: Any):
    prompt = tokens(1400, seed=4)
    lengths = [65, 129, 257, 400, 512, 777, 1000, 1234]
    prompts = [branch(prompt, m) for m in lengths]
    alone = [eager.generate(prompts=[p], mode="off")[0] for p in prompts]
    noise = worst([eager.cut(prompt=p, cuts=[33]) for p in prompts], alone)
    eager.generate(prompts=[prompt])
    hits = eager.generate(prompts=prompts)
    assert [hit["cached"] for hit in hits] == lengths
    plain = eager.generate(prompts=[branch(prompt, m, turn=2) for m in lengths], mode="off")
    zeros = eager.generate(prompts=[branch(prompt, m, turn=2) for m in lengths], mode="zero")
    assert worst(hits, alone) <= 2 * noise
    assert worst(zeros, plain) > 4 * noise


def test_a_salt_separates_what_is_stored(eager: Any):
    prompt = tokens(300, seed=6)
    eager.generate(prompts=[prompt], cache_salt="one")
    assert eager.generate(prompts=[prompt], cache_salt="two")[0]["cached"] == 0
    assert eager.generate(prompts=[prompt], cache_salt="one")[0]["cached"] == 299


def test_what_was_decoded_is_stored_too(eager: Any):
    prompt = tokens(500, seed=7)
    answer = eager.generate(prompts=[prompt], tokens=40)[0]["tokens"]
    turn = eager.generate(prompts=[prompt + answer + tokens(30, seed=8)])[0]
    # The last token was sampled, not run.
    assert turn["cached"] == 500 + 39
    assert turn["report"]["checkpoint_token"] == 500


def test_case_20_chunked_prefill_stores_every_token(chunked: Any, eager: Any):
    prompt = tokens(1400, seed=10)
    assert chunked.generate(prompts=[prompt])[0]["cached"] == 0
    again = eager.generate(prompts=[prompt])[0]
    assert again["cached"] == 1399
    assert again["report"]["lost"] == {}


@pytest.mark.parametrize("caching", [False, True])
def test_case_13_a_turn_of_a_chat_prefills_only_what_is_new(
    request: pytest.FixtureRequest, caching: bool
):
    engine = request.getfixturevalue("chunked" if caching else "eager")
    new = 30
    prompt = tokens(400, seed=27)
    free = engine.free_blocks()
    for turn in range(10):
        found = engine.generate(prompts=[prompt], tokens=70)[0]
        if turn:
            # Beside the new tokens, the last of the answer: it was sampled and never run.
            prefilled = len(prompt) - found["cached"] + found["report"]["recomputed_tokens"]
            assert prefilled == new + 1, (turn, found["report"])
        prompt = prompt + found["tokens"] + tokens(new, seed=100 + turn)
    last = prompt[: len(prompt) - new - 70]
    plain = engine.generate(prompts=[last], mode="off", cache_salt=f"plain{caching}")
    noise = worst([engine.cut(prompt=last, cuts=[33])], plain)
    assert worst([found], plain) <= 2 * noise
    assert engine.free_blocks() == free


def test_case_12_no_setting_lowers_what_is_matched(eager: Any, chunked: Any):
    prompt = tokens(1400, seed=23)
    for turn, engine in enumerate((eager, chunked), 1):
        engine.generate(prompts=[prompt])
        assert engine.generate(prompts=[branch(prompt, 901, turn=turn)])[0]["cached"] == 901


def test_case_12_nor_does_any_flag_that_cuts_or_holds_less(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    flags = {"long_prefill_token_threshold": 200, "max_num_batched_tokens": 600, "max_num_seqs": 2}
    connector = {
        "store_outputs": False,
        "store_hiddens": True,
        "checkpoint_tokens": 1,
        "max_step_tokens": 64,
        "device_pool_bytes": 1 << 20,
    }
    small = qwen35(tmp_path_factory.mktemp("flags"), layers=4)
    engine = start(model=small, connector=connector, **flags)
    prompt = tokens(1400, seed=28)
    engine.generate(prompts=[prompt])
    asked = [branch(prompt, m, turn=turn) for turn, m in enumerate((450, 901, 1237), 1)]
    found = engine.generate(prompts=asked)
    assert [one["report"]["matched_tokens"] for one in found] == [450, 901, 1237]
    assert [one["cached"] for one in found] == [450, 901, 1237]


@pytest.mark.parametrize("order", [(0, 5), (5, 0)])
def test_case_19_hits_do_not_depend_on_priority(chunked: Any, order: tuple[int, int]):
    prompt = tokens(1000, seed=20 + order[0])
    chunked.generate(prompts=[prompt])
    lengths = (300, 600)
    names = [
        chunked.add(prompt=branch(prompt, m), priority=priority)
        for m, priority in zip(lengths, order, strict=True)
    ]
    done = chunked.run()
    assert [done[name]["cached"] for name in names] == list(lengths)
