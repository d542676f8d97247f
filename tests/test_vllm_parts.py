"""The parts of the vLLM connector that need no engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_fakes import WAIT_S, config, dims, request, rows

from tailreplay.connector.client import StoreClient
from tailreplay.connector.fetch_plan import FetchPlan
from tailreplay.connector.load import Load
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.stored import StoredCheckpoint
from tailreplay.connector.vllm_config import check_supported, is_tested, settings_of
from tailreplay.connector.vllm_keep import MAX_BACKLOG, Keeper
from tailreplay.connector.vllm_load import RankLoad
from tailreplay.connector.vllm_lora import Adapters
from tailreplay.connector.vllm_meta import KeepBegin, KeepOp, LoadOp, StepOps, WorkerNews
from tailreplay.connector.vllm_model import Shard, state_blocks
from tailreplay.connector.vllm_names import Namespaces, media_element, prompt_tokens
from tailreplay.connector.vllm_take import part_of
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.chain import PrefixChain
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import extended_tokens


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"parallel_config__enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"parallel_config__use_sequence_parallel_moe": True}, "sequence-parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "wanted 'recompute'"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "wanted 'kv_both'"),
        ({"kv_transfer_config__kv_connector_extra_config": {"mode": "tail"}}, "strict=false"),
        ({"kv_transfer_config__kv_connector_extra_config": {"mood": "tail"}}, "mood"),
    ],
)
def test_an_unsupported_engine_is_refused_and_told_what_to_change(change: Any, names: str):
    check_supported(config())
    with pytest.raises(ValueError, match=names):
        check_supported(config(**change))


def test_case_28_speculative_decoding_is_refused():
    with pytest.raises(ValueError, match="wanted off: leave out speculative_config"):
        check_supported(config(speculative_config=object()))


def test_approximate_modes_are_allowed_where_nothing_can_take_them_for_exact():
    extra = {"mode": "tail"}
    check_supported(
        config(
            kv_transfer_config__kv_connector_extra_config=extra,
            cache_config__enable_prefix_caching=False,
        )
    )
    extra = {"mode": "tail", "strict": False}
    check_supported(config(kv_transfer_config__kv_connector_extra_config=extra))


def test_hiddens_are_kept_only_where_the_mode_uses_them():
    modes = {"exact": False, "tail": True, "auto": True, "off": False}
    for mode, keeps in modes.items():
        extra = {"mode": mode}
        engine = config(kv_transfer_config__kv_connector_extra_config=extra)
        assert settings_of(engine).keeps_hiddens is keeps


def test_only_tested_releases_are_served():
    assert is_tested("0.32.0")
    assert is_tested("0.32.1.dev3+cpu")
    assert not is_tested("0.33.0")
    assert not is_tested("0.3.2")


def names_for(weights: str = "w") -> Namespaces:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "x"}),
        dtype=torch.bfloat16,
        quantization=None,
        model="m",
    )
    extra = {"weights_id": weights}
    engine = config(kv_transfer_config__kv_connector_extra_config=extra, model_config=model)
    return Namespaces(engine, settings_of(engine))


def test_case_38_salt_adapter_and_weights_separate_namespaces(tmp_path: Any):
    names = names_for()
    adapters = {}
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
        lora = SimpleNamespace(
            lora_int_id=len(adapters) + 1, lora_path=str(tmp_path / name), lora_name=name
        )
        adapters[name] = names.of(request(lora_request=lora))
    plain = names.of(request())
    salted = names.of(request(cache_salt="s"))
    assert len({plain, salted, adapters["a"], adapters["b"]}) == 4
    assert adapters["a"] == adapters["c"]
    assert names_for().of(request()) == plain
    assert names_for("other").of(request()) != plain


def test_case_39_an_adapter_that_is_trained_on_in_place_is_another(tmp_path: Any):
    names = names_for()
    asked = request(
        lora_request=SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), lora_name="a")
    )
    unread = names.of(asked)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    first = names.of(asked)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"second")
    second = names.of(asked)
    assert names.of(asked) == second
    assert len({unread, first, second}) == 3


def test_case_41_media_of_any_number_never_collide():
    elements = {media_element(f"image-{i}", 0) for i in range(100_000)}
    assert len(elements) == 100_000
    assert min(elements) > 1 << 32


def test_media_stand_at_their_own_positions():
    place = SimpleNamespace(offset=2, length=2)
    feature = SimpleNamespace(identifier="cat", mm_position=place)
    found = prompt_tokens(request(prompt_token_ids=[5, 6, 7, 7, 8], mm_features=[feature]))
    assert [int(t) for t in found[[0, 1, 4]]] == [5, 6, 8]
    assert [int(t) for t in found[2:4]] == [media_element("cat", 0), media_element("cat", 1)]


def test_news_of_ranks_add_up():
    one = WorkerNews({"a": 1}, {"b": 1}, {"b": "evicted"})
    two = WorkerNews({"a": 1, "b": 1}, {}, {})
    total = one.aggregate(two)
    assert total == WorkerNews({"a": 2, "b": 1}, {"b": 1}, {"b": "evicted"})
    mine = WorkerNews(loaded={"a": {"gpu": {"kv": 1}}}, failed_puts={"fault": 1})
    more = {"a": {"gpu": {"kv": 2, "checkpoint": 4}, "cpu": {"kv": 8}}, "b": {}}
    total = mine.aggregate(WorkerNews(loaded=more, failed_puts={"fault": 1, "refused": 2}))
    assert total.loaded == {"a": {"gpu": {"kv": 3, "checkpoint": 4}, "cpu": {"kv": 8}}, "b": {}}
    assert total.failed_puts == {"fault": 2, "refused": 2}


def test_tokens_and_names_are_not_in_what_vllm_logs():
    tokens = extended_tokens([4711] * 3)
    begin = KeepBegin(b"secret" * 5, tokens, 0, (), ())
    load = LoadOp(
        *("r", b"secret" * 5, b"secret", tokens, FetchPlan("exact", True, 3)),
        *(0, (), None, None, begin),
    )
    ops = StepOps(
        loads=[load], keeps=[KeepOp("r", 0, 3, 0, begin, None, True)], finished={"r": tokens}
    )
    assert "4711" not in repr(ops)
    assert "secret" not in repr(ops)


@pytest.mark.parametrize(
    ("size", "heads", "firsts"),
    [(1, 2, [0]), (2, 2, [0, 1]), (2, 4, [0, 2]), (4, 2, [0, 0, 1, 1])],
)
def test_ranks_hold_their_heads_and_share_them_where_there_are_too_few(
    size: int, heads: int, firsts: list[int]
):
    assert [Shard(rank, size, heads).first_kv_head for rank in range(size)] == firsts


def test_a_state_lies_in_one_block_or_in_the_block_of_its_last_token():
    block_ids = ([7], [3, 4, 5], [1, 2, 9])
    assert state_blocks(block_ids, 300, (0, 256, -1)) == (7, 4, -1)
    assert state_blocks(block_ids, 256, (0, 256, -1)) == (7, 3, -1)


def load_op(plan: FetchPlan, local_tokens: int = 0) -> LoadOp:
    tokens = extended_tokens(list(range(1000)))
    return LoadOp("r", bytes(32), b"leaf", tokens, plan, local_tokens, ((1,),), None, None, None)


def test_a_rank_asks_for_its_own_heads_only():
    checkpoint = StoredCheckpoint(512, b"state")
    plan = FetchPlan("exact", True, 600, 600, 512, checkpoint)
    load = RankLoad(load_op(plan), dims(), dims(2), first_kv_head=1, rank=1)
    states = [load.ranges[n] for n in load.state_numbers]
    assert [(r.first_unit, r.units) for r in states] == [(2 * i + 1, 1) for i in range(6)]
    kv = [load.ranges[n] for n in load.kv_numbers]
    assert [(r.first_unit, r.units) for r in kv] == [(1, 1), (3, 1)]
    assert {(r.first_token, r.end_token) for r in kv} == {(0, 512)}


def test_what_vllm_has_itself_is_not_fetched_but_for_the_block_that_is_stored_next():
    state = StoredCheckpoint(784, b"state")
    plan = FetchPlan("exact", True, 900, 900, 784, state)
    load = RankLoad(load_op(plan, 784), dims(), dims(), first_kv_head=0, rank=0)
    kv = [load.ranges[n] for n in load.kv_numbers]
    assert {(r.first_token, r.end_token) for r in kv} == {(768, 784)}


def test_a_tail_asks_for_hiddens_first():
    plan = FetchPlan("tail", False, 900, 900, 900, None, 800)
    load = RankLoad(load_op(plan), dims(), dims(), first_kv_head=0, rank=0)
    assert [r.kind for r in load.ranges] == [pb.KIND_HIDDEN, pb.KIND_KV, pb.KIND_KV]


def begin_of(tokens: Any, stored: int = 0) -> KeepBegin:
    return KeepBegin(bytes(32), tokens, stored, (), ())


def stored_kv(client: StoreClient, tokens: Any) -> int:
    answer = client.match(bytes(32), tokens, timeout_s=WAIT_S)
    return max((r.end_token for r in answer.runs if r.kind == pb.KIND_KV), default=0)


def test_rows_in_any_portions_become_blocks_and_grow_with_the_answer():
    tokens = extended_tokens(list(range(1000)))
    with serve_in_thread() as server, StoreClient(server.address) as client:
        keeper = Keeper(client, PayloadCodec(dims()), WAIT_S)
        keeper.begin("r", begin_of(tokens[:700]))
        for first, end in ((0, 300), (200, 300), (300, 555), (500, 700)):
            keeper.add_rows("r", first, rows(first, end), None)
        keeper.put("r")
        keeper.add_rows("r", 700, rows(700, 800), None)
        keeper.put("r", tokens[:800])
        keeper.forget("r")
        keeper.close()
        assert stored_kv(client, tokens) == 800
        wanted = pb.Range(kind=pb.KIND_KV, first_token=0, end_token=800, first_unit=1, units=1)
        leaf = client.match(bytes(32), tokens, timeout_s=WAIT_S).leaf
        load = Load(
            [wanted],
            PayloadCodec(dims()).geometry,
            PrefixChain(bytes(32), tokens),
            stall_timeout_s=WAIT_S,
            on_event=lambda name, wanted: None,
        )
        load.run(client.fetch(bytes(32), leaf, [wanted], timeout_s=WAIT_S))
        data = load.wait(0).tobytes()
        got = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(800, 8)
        assert torch.equal(got, rows(0, 800)[0, 0, :, 0, :1].expand(-1, 8))


@pytest.mark.parametrize("lanes", [True, False])
def test_hiddens_of_every_source_are_stored_as_they_were(lanes: bool):
    tokens = extended_tokens(list(range(700)))
    codec = PayloadCodec(replace(dims(), hidden_sources=(3, 5)))
    generator = torch.Generator().manual_seed(7)
    hiddens = torch.randn(2, 700, 8, generator=generator).to(torch.bfloat16)
    with serve_in_thread() as server, StoreClient(server.address, lanes=lanes) as client:
        keeper = Keeper(client, codec, WAIT_S)
        keeper.begin("r", begin_of(tokens))
        # Rows of a batch that the next step overwrites, copied as `Capture.hidden_rows` does.
        batch = torch.empty_like(hiddens)
        for first, end in ((0, 300), (200, 555), (555, 700)):
            batch[:, : end - first] = hiddens[:, first:end]
            own = part_of(batch[:, : end - first].clone(), 1, 0, end - first)
            keeper.add_rows("r", first, rows(first, end), own)
            keeper.put("r")
        batch.fill_(float("nan"))
        keeper.close()
        assert keeper.unstored.take() == {}
        wanted = pb.Range(kind=pb.KIND_HIDDEN, first_token=0, end_token=700, first_unit=0, units=2)
        leaf = client.match(bytes(32), tokens, timeout_s=WAIT_S).leaf
        load = Load(
            [wanted],
            codec.geometry,
            PrefixChain(bytes(32), tokens),
            stall_timeout_s=WAIT_S,
            on_event=lambda name, wanted: None,
        )
        load.run(client.fetch(bytes(32), leaf, [wanted], timeout_s=WAIT_S))
        found = bytes(load.wait(0).tobytes())
    assert found == bytes(codec.pack_hidden(list(hiddens), 0, 700))


def test_a_request_s_rows_do_not_keep_those_of_the_batch():
    batch = torch.arange(200).view(1, 2, 100, 1)
    own = part_of(batch, 2, 40, 3)
    assert torch.equal(own, batch[:, :, 40:43])
    assert own.untyped_storage().nbytes() == 2 * 3 * batch.element_size()
    assert part_of(batch, 2, 0, 100).data_ptr() == batch.data_ptr()


def test_rows_behind_a_hole_are_not_stored():
    tokens = extended_tokens(list(range(600)))
    with serve_in_thread() as server, StoreClient(server.address) as client:
        keeper = Keeper(client, PayloadCodec(dims()), WAIT_S)
        keeper.begin("r", begin_of(tokens))
        keeper.add_rows("r", 0, rows(0, 100), None)
        keeper.add_rows("r", 300, rows(300, 600), None)
        keeper.put("r")
        keeper.close()
        assert stored_kv(client, tokens) == 0


@pytest.mark.parametrize("lanes", [True, False])
def test_a_prompt_that_can_not_be_packed_is_counted_told_once_and_harms_no_other(
    caplog: Any, lanes: bool
):
    # Each of its own, since the store takes a moment to hear that nobody brings one any more.
    prompts = iter(extended_tokens([n, *range(1, 300)]) for n in range(1000, 2000))
    with serve_in_thread() as server, StoreClient(server.address, lanes=lanes) as client:
        keeper = Keeper(client, PayloadCodec(dims()), WAIT_S)
        for n in range(MAX_BACKLOG + 2):  # each gives its place in the backlog back
            keeper.begin(f"bad{n}", begin_of(next(prompts)))
            keeper.add_rows(f"bad{n}", 0, rows(0, 300).to("meta"), None)
            keeper.put(f"bad{n}")
            keeper._sender.submit(lambda: None).result()
        keeper.begin("refused", begin_of(next(prompts)))
        keeper.add_rows("refused", 0, rows(0, 300)[:, :, :, :1], None)
        keeper.put("refused")
        tokens = next(prompts)
        keeper.begin("good", begin_of(tokens))
        keeper.add_rows("good", 0, rows(0, 300), None)
        keeper.put("good")
        keeper.close()
        assert keeper.unstored.take() == {"fault": MAX_BACKLOG + 2, "refused": 1}
        assert keeper.unstored.take() == {}
        assert stored_kv(client, tokens) == 300
    told = [r for r in caplog.records if "was not sent" in r.message and r.levelname == "ERROR"]
    assert [str(record.exc_info[1])[:30] for record in told] == ["can't convert meta device type"]


def test_a_prompt_for_which_the_backlog_has_no_room_is_counted():
    with serve_in_thread() as server, StoreClient(server.address) as client:
        keeper = Keeper(client, PayloadCodec(dims()), WAIT_S)
        gate = threading.Event()
        keeper._sender.submit(gate.wait, 20)
        tokens = extended_tokens(list(range(300)))
        keeper.begin("r", begin_of(tokens))
        for _ in range(MAX_BACKLOG + 1):
            keeper.put("r")
        gate.set()
        keeper.close()
        assert keeper.unstored.take() == {"write_backlog": 1}


def test_a_rank_s_state_units_are_those_of_its_key_heads():
    whole, part = (PayloadCodec(dims(n)).geometry[Kind.CHECKPOINT] for n in (1, 2))
    assert whole.units == 2 * part.units
    assert whole.row_bytes == part.row_bytes


def test_a_gap_uses_its_requests_adapter_and_leaves_the_steps_own():
    told: list[Any] = []
    manager = SimpleNamespace(set_active_adapters=lambda *said: told.append(said))
    adapters = Adapters(manager, lambda tokens, prompts, is_prefill: tokens)
    manager.set_active_adapters({"a"}, "mapping of the step")
    adapters.use(None, 2)
    adapters.restore()
    adapters.restore()
    assert [said[0] for said in told] == [{"a"}, set(), {"a"}]
    assert told[1][1] == (0, 0)
    assert told[2][1] == "mapping of the step"
