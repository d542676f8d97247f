"""What models bring of their own: experts, adapters, images, other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_media import IMAGE_TOKEN, IMAGE_TOKENS, VISION_END, VISION_START
from vllm_models import (
    ADAPTER_RANK,
    lora_adapter,
    olmo_hybrid,
    qwen3_next,
    qwen35,
    qwen35_with_vision,
)
from vllm_prompts import branch, tokens, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_experts_are_the_models_own_in_a_gap(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    moe = start(model=qwen3_next(tmp_path_factory.mktemp("moe")))
    prompt = tokens(1400, seed=19)
    moe.generate(prompts=[prompt], cache_salt="moe")
    found = moe.compare(
        prompt=branch(prompt, 777), cuts=[777], noise_cuts=[33, 777], salts=["moe", "a", "b"]
    )
    assert found["cached"] == 777
    assert found["state_error"] == 0
    assert found["tokens_equal"]


@pytest.fixture(scope="module")
def lora(
    start_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[Any], list[Any]]:
    """An engine, and two adapters of one name."""
    folder = tmp_path_factory.mktemp("lora")
    small = qwen35(folder / "model", layers=4)
    engine = start_shared(model=small, enable_lora=True, max_loras=1, max_lora_rank=ADAPTER_RANK)
    paths = [lora_adapter(folder / name, small, seed) for seed, name in enumerate("ab")]
    one, other = (["tuned", number, str(path)] for number, path in enumerate(paths, 1))
    return engine, one, other


def test_case_38_and_39_adapters_share_nothing_even_under_one_name(lora: Any):
    engine, one, other = lora
    prompt = tokens(700, seed=40)
    asked = branch(prompt, 555)
    engine.generate(prompts=[prompt], adapter=one)
    for stranger in (other, None):
        plain = engine.generate(prompts=[asked], adapter=stranger, mode="off")
        found = engine.generate(prompts=[asked], adapter=stranger)
        assert found[0]["cached"] == 0
        assert worst(found, plain) == 0
    assert engine.generate(prompts=[asked], adapter=one)[0]["cached"] == 555
    found = engine.generate(prompts=[asked], adapter=one, cache_salt="tenant")
    assert found[0]["cached"] == 0
    found = engine.generate(prompts=[branch(prompt, 555, turn=2)], adapter=one, cache_salt="tenant")
    assert found[0]["cached"] == 555


def test_a_gap_is_run_with_the_requests_own_adapter(lora: Any):
    engine, one, other = lora
    prompt = tokens(700, seed=41)
    for adapter, name in ((one, "one"), (other, "other"), (None, "none")):
        engine.generate(prompts=[prompt], adapter=adapter, cache_salt=name)
        # Whichever adapter ran last, it is not this request's.
        engine.generate(prompts=[prompt[:20]], adapter=other if adapter is one else one)
        found = engine.compare(
            prompt=branch(prompt, 333),
            cuts=[333],
            noise_cuts=[33, 333],
            salts=[name, f"a{name}", f"b{name}"],
            adapter=adapter,
        )
        assert (found["cached"], found["report"]["recomputed_tokens"]) == (333, 333)
        assert found["state_error"] == 0
        assert found["tokens_equal"]


def test_case_41_an_image_is_part_of_the_prefix_and_its_own(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    sees = start(
        model=qwen35_with_vision(tmp_path_factory.mktemp("vision")),
        images=True,
        skip_tokenizer_init=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,
    )
    image = [VISION_START, *[IMAGE_TOKEN] * IMAGE_TOKENS, VISION_END]
    text = [t % 400 for t in tokens(130, seed=42)]
    prompt = text[:100] + image + text[100:]
    first = sees.generate(prompts=[prompt], tokens=70, image=1)[0]

    # The same tokens with another image: what lies before it is shared, and no more.
    plain = sees.generate(prompts=[prompt], image=2, mode="off")
    other = sees.generate(prompts=[prompt], image=2)
    assert other[0]["cached"] == 101
    noise = worst([sees.cut(prompt=prompt, cuts=[33], image=2)], plain)
    assert worst(other, plain) <= 2 * noise
    assert worst([first], plain) > 4 * noise

    # A chat goes on behind its image, from the state at the answer's end.
    turn = prompt + first["tokens"] + text[:30]
    plain = sees.generate(prompts=[turn], image=1, mode="off")
    found = sees.generate(prompts=[turn], image=1)
    assert found[0]["cached"] == len(prompt) + 69
    assert worst(found, plain) <= 2 * noise
    assert sees.generate(prompts=[turn], image=3)[0]["cached"] == 101


def test_olmo_hybrid_is_exact_between_blocks(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    olmo = start(
        model=olmo_hybrid(tmp_path_factory.mktemp("olmo")), olmo_shims=True, max_model_len=1024
    )
    prompt = tokens(400, seed=25)
    olmo.generate(prompts=[prompt], cache_salt="olmo")
    found = olmo.compare(
        prompt=branch(prompt, 257, 40), cuts=[257], noise_cuts=[33, 257], salts=["olmo", "a", "b"]
    )
    assert found["cached"] == 257
    assert found["state_error"] == 0
    assert found["tokens_equal"]
