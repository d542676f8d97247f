"""What vLLM would give the connector, as far as the connector looks at it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from tailreplay.connector.client import StoreClient
from tailreplay.connector.model_dims import ModelDims
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.vllm_keep import Keeper
from tailreplay.connector.vllm_meta import KeepBegin
from tailreplay.connector.vllm_scheduler import SchedulerSide
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import extended_tokens

WAIT_S = 20.0
"""Deadlines on a machine that is busy with other tests."""


def config(**changes: Any) -> Any:
    """A supported engine, with changes by dotted name."""
    found = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
            use_sequence_parallel_moe=False,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="TailReplayConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        speculative_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target = found
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return found


def request(**fields: Any) -> Any:
    base = {"cache_salt": None, "lora_request": None, "mm_features": (), "prompt_token_ids": [1]}
    return SimpleNamespace(**(base | fields))


def dims(ranks: int = 1) -> ModelDims:
    return ModelDims(
        fa_layers=(3, 7),
        linear_layers=(0, 1, 2, 4, 5, 6),
        hidden_sources=(3,),
        kv_heads=2 // ranks,
        kv_head_dim=4,
        key_heads=2 // ranks,
        value_heads=4 // ranks,
        key_dim=4,
        value_dim=4,
        conv_width=3,
        hidden_size=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def rows(first: int, end: int) -> torch.Tensor:
    """Rows that say their position, `[2 layers, K and V, T, 2 heads, 4]`."""
    at = torch.arange(first, end, dtype=torch.float32)
    return at.view(1, 1, -1, 1, 1).expand(2, 2, -1, 2, 4).to(torch.bfloat16)


def engine_config(address: str, ranks: int = 1, caching: bool = False, **settings: Any) -> Any:
    """The config of an engine that serves a model like `dims`."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 2
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"layer_types": kinds}),
        hf_text_config=SimpleNamespace(layer_types=kinds),
        get_total_num_kv_heads=lambda: 2,
        dtype=torch.bfloat16,
        quantization=None,
        model="m",
    )
    engine = config(
        kv_transfer_config__kv_connector_extra_config={
            "store": address,
            "weights_id": "w",
            "match_timeout_s": WAIT_S,
            **settings,
        },
        cache_config__enable_prefix_caching=caching,
        model_config=model,
    )
    engine.parallel_config.world_size = ranks
    return engine


def scheduler_side(
    address: str,
    clock: Any = time.monotonic,
    *,
    caching: bool = False,
    block_tokens: int = 256,
    **settings: Any,
) -> SchedulerSide:
    """The scheduler's side of such an engine."""
    state = ("align", block_tokens) if caching else ("none", 4096)
    specs = [
        SimpleNamespace(mamba_cache_mode=state[0], block_size=state[1]),
        SimpleNamespace(block_size=block_tokens),
    ]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    engine = engine_config(address, caching=caching, **settings)
    return SchedulerSide(engine, SimpleNamespace(kv_cache_groups=groups), clock)


def incoming(ids: list[int]) -> Any:
    return request(
        request_id="r",
        prompt_token_ids=ids,
        num_tokens=len(ids),
        num_preemptions=0,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )


def empty_step() -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        kv_connector_block_state=None,
    )


def answered(side: SchedulerSide, asked: Any) -> tuple[int | None, bool]:
    """What the scheduler is told once the lookup is over."""
    side.on_new_request(asked)
    while (found := side.matched(asked, 0)) == (None, False):
        assert side.step(empty_step()).idle
    return found


STORED = list(range(1000))


def leave(address: str, namespace: bytes, kv: int, state: int, *, hiddens: bool = False) -> None:
    """Stores of STORED the rows up to `kv`, with hiddens or without, and the state at `state`."""
    tokens = extended_tokens(STORED)
    codec = PayloadCodec(dims())
    geometry = codec.geometry[Kind.CHECKPOINT]
    units = torch.zeros(1, geometry.units, geometry.row_bytes, dtype=torch.uint8)
    with StoreClient(address) as client:
        keeper = Keeper(client, codec, WAIT_S)
        keeper.begin("rows", KeepBegin(namespace, tokens, 0, (), ()))
        keeper.add_rows(
            "rows", 0, rows(0, kv), torch.zeros(1, kv, 8, dtype=torch.bfloat16) if hiddens else None
        )
        keeper.put("rows", tokens[:kv])
        keeper.begin("state", KeepBegin(namespace, tokens, 0, (), ()))
        keeper.add_state("state", state, units)
        keeper.put("state")
        keeper.close()


class Block:
    """vLLM's block, as far as it is looked at."""

    def __init__(self, number: int, name: str | None) -> None:
        self.block_id, self.block_hash, self.is_null = number, name, name is None


class Manager:
    """vLLM's cache manager with one FA and one linear group of blocks of 4 tokens."""

    def __init__(self, *states: Block) -> None:
        self.groups = ([Block(9, "kv")] * len(states), list(states))
        self.pinned: list[Block] = []
        self.block_pool = SimpleNamespace(touch=self.pinned.extend, free_blocks=self._free)

    def get_computed_blocks(self, request: Any) -> Any:
        return SimpleNamespace(blocks=self.groups), 4 * len(self.groups[1]), 0

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.pinned.remove(block)
