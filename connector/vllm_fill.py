"""Loads on their way into vLLM's cache: keys, values and states, then the gap up to the boundary.

Worker's main thread only. With tensor parallelism every rank does the same in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailreplay.connector.vllm_prefill import Piece, Prefiller
from tailreplay.store.objects import KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.vllm_load import RankLoad
    from tailreplay.connector.vllm_model import VllmModel


@dataclass(slots=True)
class Filling:
    """A load whose bytes are in the cache; `at` is the next token of its gap.

    `rows` are those of its last stored block, `[L, 2, t, H, d]`, in order.
    """

    load: RankLoad
    at: int
    state_blocks: tuple[int, ...]
    rows: list[Tensor] = field(default_factory=list)

    @property
    def no_past(self) -> int:
        """Token before which the states know nothing; 0 unless a tail starts from zero states."""
        return self.load.op.plan.replay_first or 0

    @property
    def block(self) -> int:
        """First token of the stored block in which the boundary lies."""
        return self.load.op.plan.used_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS

    @property
    def is_complete(self) -> bool:
        """Whether the boundary is reached."""
        return self.at == self.load.op.plan.used_tokens


class Filler:
    """Fills the cache.

    Args:
        model: this rank's view.
        codec: payloads of this rank's share.
        step_tokens: tokens of gaps and tails run in one engine step.
    """

    def __init__(self, model: VllmModel, codec: PayloadCodec, step_tokens: int) -> None:
        self._model = model
        self._codec = codec
        self._step_tokens = step_tokens
        self._prefiller = Prefiller(model)
        self._filling: dict[str, Filling] = {}

    def __len__(self) -> int:
        """How many loads have a gap left."""
        return len(self._filling)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's load has a gap left."""
        return request_id in self._filling

    def give_up(self) -> list[str]:
        """Forgets all loads; says which."""
        gone = list(self._filling)
        self._filling.clear()
        return gone

    def drop(self, request_id: str) -> None:
        """Forgets a load, if it is here."""
        self._filling.pop(request_id, None)

    def install(self, load: RankLoad) -> None:
        """Writes keys, values and the state to start from; what follows is the gap."""
        op, plan = load.op, load.op.plan
        if plan.used_tokens % self._model.block_size(self._model.fa_gid[0]):
            self._model.clear_block(op.block_ids, plan.used_tokens)
        if op.local_tokens < plan.prefill_from:
            self._model.write_kv(op.block_ids, op.local_tokens, self._kv(load, op.local_tokens))
        blocks = self._model.state_blocks(op.block_ids, plan.used_tokens)
        self._install_state(load, blocks)
        filling = Filling(load, _compute_from(plan), blocks)
        self._filling[op.request_id] = filling
        if op.begin is not None and filling.block < plan.prefill_from:
            tail = torch.stack([torch.stack(pair) for pair in self._kv(load, filling.block)])
            filling.rows.append(tail.transpose(2, 3).to(self._model.local.device))

    def run_gaps(self) -> list[Filling]:
        """Runs the next pieces of all gaps and tails; returns the loads that are complete."""
        for due in _by_adapter(self._due()):
            self._prefill([pair for pair in due if not pair[0].load.hidden_numbers])
            self._replay([pair for pair in due if pair[0].load.hidden_numbers])
        complete = [r for r, filling in self._filling.items() if filling.is_complete]
        return [self._filling.pop(request_id) for request_id in complete]

    def restore_adapters(self) -> None:
        """As `Prefiller.restore_adapters`."""
        self._prefiller.restore_adapters()

    def _kv(self, load: RankLoad, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[H, T, d]` from token `first` on, one layer at a time."""
        for number in load.kv_numbers:
            yield self._codec.unpack_kv(load.rows(number, first))

    def _install_state(self, load: RankLoad, blocks: tuple[int, ...]) -> None:
        if load.op.plan.checkpoint is None:
            self._model.clear_states(blocks)
        elif load.op.local_state is not None:
            self._model.copy_states(load.op.local_state, blocks)
        else:
            units = torch.cat([load.rows(n) for n in load.state_numbers])
            self._model.write_states(blocks, self._codec.unpack_checkpoint(units))

    def _due(self) -> list[tuple[Filling, Piece]]:
        """The next piece of each load that has one, first come first served, within the budget."""
        budget = self._step_tokens
        due: list[tuple[Filling, Piece]] = []
        for filling in self._filling.values():
            op = filling.load.op
            end = min(op.plan.used_tokens, filling.at + budget)
            if end > filling.at:
                ids = [int(t) for t in op.tokens[filling.at : end]]
                past = filling.at - filling.no_past
                writes = filling.at >= op.plan.prefill_from
                blocks = filling.state_blocks
                piece = Piece(ids, filling.at, past, op.block_ids, blocks, writes, op.adapter)
                due.append((filling, piece))
                budget -= len(ids)
        return due

    def _prefill(self, due: Sequence[tuple[Filling, Piece]]) -> None:
        if not due:
            return
        self._prefiller.run([piece for _, piece in due])
        rows = self._model.capture.kv_rows(sum(len(p.ids) for _, p in due))
        at = 0
        for filling, piece in due:
            _add_gap_rows(filling, piece, rows[:, :, at : at + len(piece.ids)])
            filling.at = piece.end
            at += len(piece.ids)

    def _replay(self, due: Sequence[tuple[Filling, Piece]]) -> None:
        if not due:
            return
        hidden = {}
        for number, source in enumerate(self._model.capture.sources):
            parts = []
            for filling, piece in due:
                rows = filling.load.rows(filling.load.hidden_numbers[number])
                first = piece.first - filling.no_past
                own = self._codec.unpack_hidden(rows)[first : first + len(piece.ids)]
                parts.append(own.to(self._model.local.device))
            hidden[source] = torch.cat(parts)
        self._prefiller.replay([piece for _, piece in due], hidden)
        for filling, piece in due:
            filling.at = piece.end


def _add_gap_rows(filling: Filling, piece: Piece, rows: Tensor) -> None:
    """Keeps the rows of a gap that lie in the block that is stored next."""
    skip = max(0, filling.block - piece.first)
    if filling.load.op.begin is not None and skip < rows.shape[2]:
        filling.rows.append(rows[:, :, skip:])


def _by_adapter(due: Sequence[tuple[Filling, Piece]]) -> list[list[tuple[Filling, Piece]]]:
    """Pieces of each adapter: vLLM has room for a few adapters in one forward."""
    groups: dict[int, list[tuple[Filling, Piece]]] = {}
    for pair in due:
        adapter = pair[1].adapter
        groups.setdefault(0 if adapter is None else adapter.lora_int_id, []).append(pair)
    return list(groups.values())


def _compute_from(plan: FetchPlan) -> int:
    """First token that is run; a tail is run whole, since its keys and values are there."""
    return plan.prefill_from if plan.replay_first is None else plan.replay_first
