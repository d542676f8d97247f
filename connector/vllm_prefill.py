"""Running a model's own layers over tokens that lie behind a loaded or local state.

One batch holds a piece of every load that is due; vLLM's own metadata builders and modules do the
work, so nothing here knows a kernel. The forward context is a global of the process: main thread
only, and all tensor-parallel ranks in the same step with the same pieces.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailreplay.replay.groups import replay_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tailreplay.connector.vllm_meta import BlockIds
    from tailreplay.connector.vllm_model import VllmModel

_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first, end) of one request.

    Attributes:
        ids: token ids of the piece.
        first: position of the first.
        past: tokens that the state before `first` stands for; 0 = zero states.
        block_ids: the request's blocks.
        state_blocks: per kv-cache group, the block with its state, before and after.
        writes: whether its keys and values go into the cache; not where better ones are there.
        adapter: the request's LoRARequest; None without one. The same for all pieces of a batch.
    """

    ids: Sequence[int]
    first: int
    past: int
    block_ids: BlockIds
    state_blocks: tuple[int, ...]
    writes: bool = True
    adapter: Any = None

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
        self._adapters = getattr(model.inner, "tailreplay_adapters", None)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> None:
        """The whole model over each piece, its keys and values in the cache up to `first`.

        Writes the states after the pieces; the capture buffers then hold their rows, back to back.
        """
        ids, positions = self._inputs(pieces)
        metadata, slots = self._fa_metadata(pieces)
        metadata |= self._state_metadata(pieces)
        self._use_adapter(pieces[0].adapter, len(ids))
        with self._context(metadata, slots, len(ids)):
            self._model.inner(ids, positions, None)

    @torch.inference_mode()
    def replay(self, pieces: Sequence[Piece], hidden: Mapping[int, Tensor]) -> None:
        """The linear layers alone over each piece, from stored hiddens, without any KV.

        Writes the states after the pieces. Of each group's last layer only the mixer runs: nobody
        reads what would follow.

        Args:
            pieces: what to run.
            hidden: rows `[T, D]` of all pieces, back to back, by FA layer.

        Source: Tail-Replay, arXiv 2608.30310.
        """
        ids, positions = self._inputs(pieces)
        self._use_adapter(pieces[0].adapter, len(ids))
        with self._context(self._state_metadata(pieces), {}, len(ids)):
            for group in replay_groups(self._model.inner.config.layer_types):
                if group.source is None:
                    rows = self._model.inner.embed_input_ids(ids)
                else:
                    rows = hidden[group.source].to(self._model.local.device)
                layers = [self._model.inner.layers[i] for i in group.linear_layers]
                _run_group(layers, rows, positions)

    def restore_adapters(self) -> None:
        """Gives the step's own forward, whose logits come later, its adapters back."""
        if self._adapters is not None:
            self._adapters.restore()

    def _use_adapter(self, adapter: Any, tokens: int) -> None:
        """Raises RuntimeError where there is an adapter and no way to use it."""
        if self._adapters is not None:
            self._adapters.use(adapter, tokens)
        elif adapter is not None:
            raise RuntimeError("a request has an adapter, and vLLM's adapter manager is not known")

    def _inputs(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        device = self._model.local.device
        ids = torch.tensor([t for p in pieces for t in p.ids], device=device)
        positions = torch.cat([torch.arange(p.first, p.end) for p in pieces]).to(device)
        if self._model.config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        return ids, positions

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
            targets = torch.cat([self._slots(gid, p) for p in pieces])
            built = self._build(gid, pieces, self._tables(gid, pieces), targets)
            for name in self._model.groups[gid].layer_names:
                metadata[name], slots[name] = built, targets
        return metadata, slots

    def _slots(self, gid: int, piece: Piece) -> Tensor:
        slots = self._model.slots(gid, piece.block_ids, piece.first, piece.end)
        return slots if piece.writes else torch.full_like(slots, _NO_SLOT)

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
        nowhere = torch.full(
            (tokens,), _NO_SLOT, dtype=torch.int64, device=self._model.local.device
        )
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


def _run_group(layers: Sequence[Any], rows: Tensor, positions: Tensor) -> None:
    """A replay group over its source's rows; Qwen's layers hand on a residual, OLMo's do not."""
    residual = None
    hidden = rows
    for layer in layers[:-1]:
        if _has_residual(layer):
            hidden, residual = layer(hidden_states=hidden, residual=residual, positions=positions)
        else:
            hidden = layer(positions, hidden)
    last = layers[-1]
    if residual is None:
        hidden = last.input_layernorm(hidden)
    else:
        hidden, _ = last.input_layernorm(hidden, residual)
    if _has_residual(last):
        last.linear_attn(hidden_states=hidden)
    else:
        last.linear_attn(hidden_states=hidden, output=torch.empty_like(hidden))


def _has_residual(layer: Any) -> bool:
    return "residual" in inspect.signature(type(layer).forward).parameters
