"""Running a model's own layers over tokens that lie behind a loaded or local state.

One batch holds a piece of every load that is due; vLLM's own metadata builders and modules do the
work, so nothing here knows a kernel. The forward context is a global of the process: main thread
only, and all tensor-parallel ranks in the same step with the same pieces.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailreplay.connector.vllm_meta import BlockIds
    from tailreplay.connector.vllm_model import VllmModel


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first, end) of one request.

    Attributes:
        ids: token ids of the piece.
        first: position of the first.
        past: tokens that the state before `first` stands for; 0 = zero states.
        block_ids: the request's blocks.
        state_blocks: per kv-cache group, the block with its state, before and after.
    """

    ids: Sequence[int]
    first: int
    past: int
    block_ids: BlockIds
    state_blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + len(self.ids)


class Prefiller:
    """Runs pieces. Keeps vLLM's metadata builders, one per kv-cache group.

    Args:
        model: this rank's view.
    """

    def __init__(self, model: VllmModel) -> None:
        self._model = model
        self._builders: dict[int, Any] = {}

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> None:
        """The whole model over each piece, its keys and values in the cache up to `first`.

        Writes keys and values of the pieces and the states after them; the capture buffers then
        hold the pieces' rows, back to back.
        """
        device = self._model.local.device
        ids = torch.tensor([t for p in pieces for t in p.ids], device=device)
        positions = torch.cat([torch.arange(p.first, p.end) for p in pieces]).to(device)
        if self._model.config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        metadata, slots = self._fa_metadata(pieces)
        metadata |= self._state_metadata(pieces)
        with self._context(metadata, slots, len(ids)):
            self._model.inner(ids, positions)

    @contextmanager
    def _context(
        self, metadata: dict[str, Any], slots: dict[str, Tensor], tokens: int
    ) -> Iterator[None]:
        """A forward context in which MoE layers are found by their own name.

        vLLM may count through a list of them instead, which is right for whole forwards only.
        """
        from vllm.forward_context import get_forward_context, set_forward_context

        with set_forward_context(
            metadata,
            self._model.config,
            num_tokens=tokens,
            slot_mapping=slots,
            skip_compiled=True,
        ):
            get_forward_context().all_moe_layers = None
            yield

    def _fa_metadata(self, pieces: Sequence[Piece]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for gid in set(self._model.fa_gid):
            rows = [self._model.slots(gid, p.block_ids, p.first, p.end) for p in pieces]
            built = self._build(gid, pieces, self._tables(gid, pieces), torch.cat(rows))
            for name in self._model.groups[gid].layer_names:
                metadata[name], slots[name] = built, torch.cat(rows)
        return metadata, slots

    def _tables(self, gid: int, pieces: Sequence[Piece]) -> Tensor:
        """Block tables `[pieces, blocks]` in the attention kernel's blocks."""
        number = self._model.fa_gid.index(gid)
        kernel_blocks = self._model.capture.attentions[number].kv_cache.shape[0]
        parts = kernel_blocks // self._model.num_blocks
        size = self._model.block_size(gid)
        width = max(math.ceil(p.end / size) for p in pieces)
        table = torch.zeros(len(pieces), width, dtype=torch.int32)
        for row, piece in enumerate(pieces):
            ids = piece.block_ids[gid][:width]
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        inside = torch.arange(parts, dtype=torch.int32)
        return torch.flatten(table[:, :, None] * parts + inside, 1)

    def _state_metadata(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Metadata under which each piece finds its state in one block, wherever it looks."""
        metadata: dict[str, Any] = {}
        tokens = sum(len(p.ids) for p in pieces)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=self._model.local.device)
        for gid in self._model.mamba_gids:
            width = max(math.ceil(p.end / self._model.block_size(gid)) for p in pieces)
            blocks = torch.tensor([p.state_blocks[gid] for p in pieces], dtype=torch.int32)
            built = self._build(gid, pieces, blocks[:, None].repeat(1, width), nowhere)
            built = replace(built, checkpoint=None)
            metadata |= dict.fromkeys(self._model.groups[gid].layer_names, built)
        return metadata

    def _build(self, gid: int, pieces: Sequence[Piece], table: Tensor, slots: Tensor) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device = self._model.local.device
        lengths = torch.tensor([0] + [len(p.ids) for p in pieces], dtype=torch.int32)
        starts = lengths.cumsum(0, dtype=torch.int32)
        is_state = gid in self._model.mamba_gids
        ends = [p.past + len(p.ids) if is_state else p.end for p in pieces]
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        return self._builder(gid).build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=seq_lens.to(device),
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=len(pieces),
                num_actual_tokens=int(starts[-1]),
                max_query_len=int(lengths.max()),
                max_seq_len=max(ends),
                block_table_tensor=table.to(device),
                slot_mapping=slots,
                is_prefilling=torch.ones(len(pieces), dtype=torch.bool),
            ),
        )

    def _builder(self, gid: int) -> Any:
        if gid not in self._builders:
            group = self._model.groups[gid]
            context = self._model.config.compilation_config.static_forward_context
            backend = context[group.layer_names[0]].get_attn_backend()
            self._builders[gid] = backend.get_builder_cls()(
                group.kv_cache_spec,
                group.layer_names,
                self._model.config,
                self._model.local.device,
            )
        return self._builders[gid]
