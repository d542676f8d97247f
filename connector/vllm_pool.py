"""One rank's GPU tier: what it has loaded or computed last, so that it is not loaded again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailreplay.connector.device_pool import HIDDEN_WINDOW_TOKENS
from tailreplay.store.chain import PrefixChain
from tailreplay.store.objects import PAGE_TOKENS, Kind, ObjectName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.vllm_load import RankLoad
    from tailreplay.store.tokens import ExtendedTokens

_BATCH_PAGES = 16
"""Pages of a load that are put together at once; they are copied in between."""


class RankPool:
    """Puts a rank's exact rows and states into the pool, named by the prompts they belong to.

    Main thread only. Of a page whose rows come in several steps those that have come are kept
    beside the pool, at most one page a kind and request.

    Args:
        pool: the memory.
        computed_kv: whether keys and values that the engine computes are put there. Where vLLM
            caches prefixes it has them itself, and only those it had to load are worth a place.
    """

    def __init__(self, pool: DevicePool, *, computed_kv: bool) -> None:
        self.pool = pool
        self._computed_kv = computed_kv
        # Prompts by request, and of each kind the first row and the rows of a page begun.
        self._chains: dict[str, PrefixChain] = {}
        self._open: dict[tuple[str, Kind], tuple[int, Tensor]] = {}

    def begin(self, request_id: str, namespace: bytes, tokens: ExtendedTokens) -> None:
        """Says what a request's rows belong to; again, with more tokens, at its end."""
        known = self._chains.get(request_id)
        if known is None or len(known) < len(tokens):
            self._chains[request_id] = PrefixChain(namespace, tokens)

    def forget(self, request_id: str) -> None:
        """Lets a request's page begun go; what is in the pool stays."""
        self._chains.pop(request_id, None)
        for kind in Kind:
            self._open.pop((request_id, kind), None)

    def __len__(self) -> int:
        """Requests that have begun."""
        return len(self._chains)

    def grown(self, request_id: str, tokens: ExtendedTokens) -> None:
        """Takes the tokens of an answer, too."""
        if (chain := self._chains.get(request_id)) is not None:
            self.begin(request_id, chain.namespace, tokens)

    def add_kv(self, request_id: str, first: int, kv: Tensor) -> None:
        """Takes computed keys and values `[L, 2, T, H, d]` from token `first` on."""
        if self._computed_kv and self._takes(request_id, first):
            rows = kv.permute(0, 3, 2, 1, 4).flatten(0, 1).flatten(2)
            self._add(request_id, Kind.KV, first, _as_bytes(rows))

    def add_hidden(self, request_id: str, first: int, hidden: Tensor) -> None:
        """Takes computed hiddens `[sources, T, D]` from token `first` on."""
        if self._takes(request_id, first):
            window = len(self._chains[request_id]) - HIDDEN_WINDOW_TOKENS
            skip = max(0, window - first)
            if skip < hidden.shape[1]:
                rows = _as_bytes(hidden[:, skip:])
                self._add(request_id, Kind.HIDDEN, first + skip, rows)

    def add_state(self, request_id: str, tokens: int, rows: Tensor) -> None:
        """Takes the state after `tokens` tokens, `[units, 1, row bytes]` uint8."""
        if (chain := self._chains.get(request_id)) is not None:
            self._put_state(chain.namespace, chain.prefix_hash(tokens), rows)

    def add_load(self, load: RankLoad) -> None:
        """Takes what a load has brought, keys and values last of all."""
        chain, plan = PrefixChain(load.op.namespace, load.op.tokens), load.op.plan
        self._put_loaded(chain, Kind.KV, load, load.kv_numbers)
        self._put_loaded(chain, Kind.HIDDEN, load, load.hidden_numbers)
        if plan.checkpoint is not None and load.state_numbers:
            rows = torch.cat([load.rows(n) for n in load.state_numbers])
            self._put_state(chain.namespace, plan.checkpoint.prefix_hash, rows)

    def _takes(self, request_id: str, first: int) -> bool:
        chain = self._chains.get(request_id)
        return chain is not None and first < len(chain)

    def _add(self, request_id: str, kind: Kind, first: int, rows: Tensor) -> None:
        begun_at, begun = self._open.pop((request_id, kind), (0, None))
        if begun is not None and begun_at + begun.shape[1] == first:
            first, rows = begun_at, torch.cat((begun, rows), 1)
        end = first + rows.shape[1]
        page, last = -(-first // PAGE_TOKENS) * PAGE_TOKENS, end // PAGE_TOKENS * PAGE_TOKENS
        if page < last:
            self._put_pages(
                self._chains[request_id], kind, page, rows[:, page - first : last - first]
            )
        rest = max(page, last)
        if rest < end:
            self._open[request_id, kind] = rest, rows[:, rest - first :].clone()

    def _put_pages(self, chain: PrefixChain, kind: Kind, first: int, rows: Tensor) -> None:
        units, count, width = rows.shape
        pages = rows.view(units, -1, PAGE_TOKENS, width).transpose(0, 1)
        self.pool.put(
            _names(chain, kind, first, first + count),
            (units, PAGE_TOKENS, width),
            lambda lacking: pages[lacking],
            before=_names(chain, kind, 0, first) if kind is Kind.KV else (),
        )

    def _put_loaded(
        self, chain: PrefixChain, kind: Kind, load: RankLoad, numbers: Sequence[int]
    ) -> None:
        """Puts the whole pages of one kind, a few at a time."""
        if not numbers:
            return
        wanted = load.ranges[numbers[0]]
        first = -(-wanted.first_token // PAGE_TOKENS) * PAGE_TOKENS
        last = wanted.end_token // PAGE_TOKENS * PAGE_TOKENS
        step = _BATCH_PAGES * PAGE_TOKENS
        for at in range(first, last, step):
            end = min(at + step, last)
            if any(name not in self.pool for name in _names(chain, kind, at, end)):
                rows = torch.cat([load.rows(n, at, end) for n in numbers])
                self._put_pages(chain, kind, at, rows)

    def _put_state(self, namespace: bytes, prefix_hash: bytes, rows: Tensor) -> None:
        units, _, width = rows.shape
        name = ObjectName(namespace, Kind.CHECKPOINT, prefix_hash)
        self.pool.put([name], (units, 1, width), lambda _: rows[None])


def _names(chain: PrefixChain, kind: Kind, first: int, end: int) -> list[ObjectName]:
    """Names of the pages [first, end), by their ends."""
    ends = range(first + PAGE_TOKENS, end + 1, PAGE_TOKENS)
    return [ObjectName(chain.namespace, kind, chain.prefix_hash(token)) for token in ends]


def _as_bytes(rows: Tensor) -> Tensor:
    """The bytes of rows `[units, rows, elements]`."""
    return rows.contiguous().view(torch.uint8)
