"""One rank's view of a hybrid model inside vLLM: shapes, head shards, paged KV and states.

Token-granular access to vLLM's caches, whatever the attention backend's own block layout.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailreplay.connector.model_dims import ModelDims
from tailreplay.replay.groups import LINEAR
from tailreplay.replay.linear_state import LinearState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tailreplay.connector.vllm_capture import Capture
    from tailreplay.connector.vllm_meta import BlockIds


class Shard:
    """Which heads a tensor-parallel rank has, and how the shares come together on rank 0.

    With fewer KV heads than ranks, neighbouring ranks hold the same head.

    Args:
        rank: this rank.
        size: ranks.
        kv_heads: KV heads of the whole model.
        group: vLLM's tensor-parallel group; None with one rank.
    """

    def __init__(self, rank: int, size: int, kv_heads: int, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._copies = max(1, size // kv_heads)
        self.kv_heads = max(1, kv_heads // size)
        self.first_kv_head = rank // self._copies * self.kv_heads
        self._group = group

    def gather_kv(self, rows: Tensor) -> Tensor | None:
        """All KV heads `[L, 2, T, H, d]` on rank 0, None elsewhere; all ranks call it."""
        return self._gather(rows, 3, self._copies)

    def gather_units(self, units: Tensor) -> Tensor | None:
        """All key heads `[L, H, bytes]` on rank 0, None elsewhere; all ranks call it."""
        return self._gather(units, 1, 1)

    def _gather(self, x: Tensor, dim: int, step: int) -> Tensor | None:
        """On the host, over the group's own CPU channel.

        Not by vLLM's gather for CPUs: ranks that only send run ahead of it, and the next
        collective but one then waits for ever.
        """
        if self.size == 1:
            return x
        own = x.cpu().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        flat = None if parts is None else [p.view(torch.uint8) for p in parts]
        group = self._group.cpu_group
        torch.distributed.gather(own.view(torch.uint8), flat, group=group, group_dst=0)
        return None if parts is None else torch.cat(parts[::step], dim)


class VllmModel:
    """One rank's part of the model and its caches. Used on the worker's main thread only.

    Args:
        capture: the model's capture buffers.
        vllm_config: the engine's config.
        kv_cache_config: vLLM's kv-cache groups.
        shard: this rank's heads.

    Attributes:
        whole: shapes of the model.
        local: shapes of this rank's share.
        inner: the inner model.
        fa_gid: kv-cache group of each FA layer, in layer order.
        mamba_gids: kv-cache groups of linear layers.
    """

    def __init__(
        self,
        capture: Capture,
        vllm_config: Any,
        kv_cache_config: Any,
        shard: Shard,
    ) -> None:
        self.capture = capture
        self.shard = shard
        self.inner = capture.model
        self.config = vllm_config
        self.groups = kv_cache_config.kv_cache_groups
        self.num_blocks = kv_cache_config.num_blocks
        kinds = self.inner.config.layer_types
        linear = tuple(i for i, kind in enumerate(kinds) if kind == LINEAR)
        self._linear = [self.inner.layers[i].linear_attn for i in linear]
        self._gid_of = {name: g for g, x in enumerate(self.groups) for name in x.layer_names}
        self.fa_gid = [self._gid_of[a.layer_name] for a in capture.attentions]
        self.mamba_gids = sorted({self._gid_of[m.prefix] for m in self._linear})
        self.whole = self._dims(linear, 1)
        self.local = self._dims(linear, shard.size)

    def block_size(self, gid: int) -> int:
        """Tokens in a block of a kv-cache group."""
        size: int = self.groups[gid].kv_cache_spec.block_size
        return size

    def slots(self, gid: int, block_ids: BlockIds, first: int, end: int) -> Tensor:
        """Slots `[end - first]` int64 of tokens [first, end) in an FA group."""
        size = self.block_size(gid)
        positions = torch.arange(first, end)
        blocks = torch.tensor(block_ids[gid], dtype=torch.int64)
        return (blocks[positions // size] * size + positions % size).to(self.local.device)

    def write_kv(
        self, block_ids: BlockIds, first: int, layers: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Puts keys and values `[H, T, d]` of every FA layer into the cache, from token `first`."""
        for attention, gid, (keys, values) in zip(
            self.capture.attentions, self.fa_gid, layers, strict=True
        ):
            device = self.local.device
            slots = self.slots(gid, block_ids, first, first + keys.shape[1])
            attention.impl.do_kv_cache_update(
                attention,
                keys.transpose(0, 1).contiguous().to(device),
                values.transpose(0, 1).contiguous().to(device),
                attention.kv_cache,
                slots,
            )

    def clear_block(self, block_ids: BlockIds, token: int) -> None:
        """Zeroes the FA block in which `token` lies.

        vLLM leaves it as it was when a load is to fill it; the rows behind a boundary inside the
        block would then be another request's bytes, NaN among them.
        """
        for attention, gid in zip(self.capture.attentions, self.fa_gid, strict=True):
            attention.kv_cache[block_ids[gid][token // self.block_size(gid)]].zero_()

    def state_blocks(self, block_ids: BlockIds, tokens: int) -> tuple[int, ...]:
        """Block per kv-cache group that holds the state after `tokens` tokens; -1 for FA groups."""
        return state_blocks(block_ids, tokens, self._state_sizes)

    @functools.cached_property
    def _state_sizes(self) -> tuple[int, ...]:
        return state_sizes(self.groups)

    def read_states(self, blocks: Sequence[int]) -> dict[int, LinearState]:
        """Copies this rank's states out of their blocks."""
        states = {}
        for layer, module in zip(self.local.linear_layers, self._linear, strict=True):
            conv, recurrent = module.kv_cache
            block = blocks[self._gid_of[module.prefix]]
            states[layer] = LinearState(
                self._conv_out(conv[block]), self._recurrent_out(recurrent[block])
            )
        return states

    def write_states(self, blocks: Sequence[int], states: Mapping[int, LinearState]) -> None:
        """Copies this rank's states into their blocks."""
        for layer, module in zip(self.local.linear_layers, self._linear, strict=True):
            conv, recurrent = module.kv_cache
            block = blocks[self._gid_of[module.prefix]]
            self._conv_out(conv[block], copy=False).copy_(states[layer].conv)
            self._recurrent_out(recurrent[block], copy=False).copy_(states[layer].recurrent)

    def clear_states(self, blocks: Sequence[int]) -> None:
        """Sets the states in their blocks to zero."""
        for module in self._linear:
            for tensor in module.kv_cache:
                tensor[blocks[self._gid_of[module.prefix]]].zero_()

    def copy_states(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies this rank's states from blocks to blocks."""
        for module in self._linear:
            gid = self._gid_of[module.prefix]
            for tensor in module.kv_cache:
                tensor[target[gid]].copy_(tensor[source[gid]])

    def _conv_out(self, block: Tensor, *, copy: bool = True) -> Tensor:
        """A block's conv state as `[channels, width]`."""
        view = block if _conv_is_channel_first() else block.T
        return view.clone() if copy else view

    def _recurrent_out(self, block: Tensor, *, copy: bool = True) -> Tensor:
        """A block's recurrent state as `[HV, K, V]`.

        vLLM declares `[HV, V, K]`. Its GPU kernels keep to that; its CPU kernels use the same
        memory as `[HV, K, V]`.
        """
        local = self.local
        if local.device.type == "cpu":
            view = block.view(local.value_heads, local.key_dim, local.value_dim)
        else:
            view = block.transpose(1, 2)
        return view.to(torch.float32, copy=True) if copy else view

    def _dims(self, linear: tuple[int, ...], size: int) -> ModelDims:
        config, attention = self.inner.config, self.capture.attentions[0]
        return ModelDims(
            fa_layers=self.capture.fa_layers,
            linear_layers=linear,
            hidden_sources=self.capture.sources,
            kv_heads=attention.num_kv_heads if size > 1 else self.total_kv_heads,
            kv_head_dim=attention.head_size,
            key_heads=config.linear_num_key_heads // size,
            value_heads=config.linear_num_value_heads // size,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim - 1,
            hidden_size=config.hidden_size,
            dtype=self.config.model_config.dtype,
            device=attention.kv_cache.device,
        )

    @property
    def total_kv_heads(self) -> int:
        """KV heads of the whole model."""
        heads: int = self.config.model_config.get_total_num_kv_heads()
        return heads


def state_sizes(groups: Sequence[Any]) -> tuple[int, ...]:
    """Tokens a state block stands for, per kv-cache group; 0 = one block for all, -1 = FA group."""
    sizes = []
    for group in groups:
        mode = getattr(group.kv_cache_spec, "mamba_cache_mode", None)
        sizes.append({None: -1, "align": group.kv_cache_spec.block_size}.get(mode, 0))
    return tuple(sizes)


def state_blocks(block_ids: BlockIds, tokens: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Block per kv-cache group that holds the state after `tokens` tokens; -1 for FA groups."""
    return tuple(
        -1 if size < 0 else ids[(tokens - 1) // size if size else 0]
        for ids, size in zip(block_ids, sizes, strict=True)
    )


def _conv_is_channel_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    first: bool = is_conv_state_dim_first()
    return first
