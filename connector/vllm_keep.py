"""What an engine computes, on its way to the store: rows and states gathered per request.

Rows come in on the worker's main thread, step by step; one thread packs and sends them. Only rank
0 has a keeper; the other ranks give it their heads.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailreplay.connector.outgoing import outgoing
from tailreplay.connector.plan import plan_put
from tailreplay.connector.stored import StoredPrefix
from tailreplay.connector.vllm_unstored import Unstored
from tailreplay.store.chain import PrefixChain
from tailreplay.store.errors import StoreUnavailable, TailReplayError
from tailreplay.store.objects import KV_BLOCK_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailreplay.connector.client import StoreClient
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.connector.vllm_meta import KeepBegin
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)

MAX_BACKLOG = 8
"""Prompts that may wait to be sent; beyond it a prompt stays unstored."""


@dataclass(slots=True)
class _Kept:
    """One request's rows from token `first` to `end`, and states by token.

    Hiddens begin at `hidden_first`, no earlier than `first`, for loaded rows come without.
    """

    namespace: bytes
    tokens: ExtendedTokens
    stored: StoredPrefix
    known_states: set[int]
    first: int = 0
    end: int = 0
    hidden_first: int = 0
    kv: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    states: dict[int, memoryview] = field(default_factory=dict)


class Keeper:
    """Gathers and sends. Called from the worker's main thread.

    Args:
        client: the store.
        codec: payloads of the whole model.
        put_timeout_s: deadline of one write-back.
        tenant: digest of the tenant whose objects they are.

    Attributes:
        unstored: counts the prompts that stay unstored.
    """

    def __init__(
        self, client: StoreClient, codec: PayloadCodec, put_timeout_s: float, tenant: bytes = b""
    ) -> None:
        self.unstored = Unstored()
        self._client = client
        self._codec = codec
        self._put_timeout_s = put_timeout_s
        self._tenant = tenant
        # Touched by the main thread only.
        self._kept: dict[str, _Kept] = {}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="tailreplay-put")
        self._waiting = threading.Semaphore(MAX_BACKLOG)

    def begin(self, request_id: str, begin: KeepBegin) -> None:
        """Starts a request, or starts it over after a preemption; rows it has are kept."""
        if request_id not in self._kept:
            stored = StoredPrefix(
                begin.stored_kv_tokens,
                kv_tokens=begin.stored_kv_tokens,
                hidden=begin.stored_hidden,
            )
            self._kept[request_id] = _Kept(
                begin.namespace, begin.tokens, stored, set(begin.checkpoints)
            )

    def add_rows(self, request_id: str, first: int, kv: Tensor, hidden: Tensor | None) -> None:
        """Appends rows; those it has already are skipped, and a hole drops what lies before it.

        Args:
            request_id: begun before; others are ignored.
            first: position of the first row.
            kv: `[L, 2, T, H, d]`, all heads.
            hidden: `[sources, T, D]`, or None.
        """
        kept = self._kept.get(request_id)
        if kept is None:
            return
        if not kept.kv or first > kept.end:
            kept.first, kept.end = first, first
            kept.kv, kept.hidden = [], []
        skip = kept.end - first
        if skip >= kv.shape[2]:
            return
        kept.kv.append(kv[:, :, skip:])
        if hidden is None:
            kept.hidden = []
        else:
            if not kept.hidden:
                kept.hidden_first = kept.end
            kept.hidden.append(hidden[:, skip:])
        kept.end = first + kv.shape[2]

    def add_state(self, request_id: str, tokens: int, units: Tensor) -> None:
        """Keeps the state after `tokens` tokens: `[L, H, bytes]` uint8, all key heads."""
        kept = self._kept.get(request_id)
        if kept is not None and tokens not in kept.known_states:
            kept.states[tokens] = units.contiguous().numpy().reshape(-1).data
            kept.known_states.add(tokens)

    def put(self, request_id: str, tokens: ExtendedTokens | None = None) -> None:
        """Sends what the store lacks, in the background; rows of whole blocks are let go.

        Args:
            request_id: begun before; others are ignored.
            tokens: all of the request's tokens where that is more than the prompt.
        """
        kept = self._kept.get(request_id)
        if kept is None:
            return
        if tokens is not None:
            kept.tokens = tokens
        if not self._waiting.acquire(blocking=False):
            self.unstored.count("write_backlog")
            return
        try:
            self._sender.submit(self._send, self._cut(kept))
        except BaseException:
            self._waiting.release()
            raise

    def forget(self, request_id: str) -> None:
        """Lets a request's rows go."""
        self._kept.pop(request_id, None)

    def close(self) -> None:
        """Sends what is waiting, then ends the thread."""
        self._sender.shutdown(wait=True)

    def _cut(self, kept: _Kept) -> _Kept:
        """What is to be sent now; `kept` goes on with the rows of the last, partial block."""
        sent = replace(kept, kv=_joined(kept.kv, 2), hidden=_joined(kept.hidden, 1))
        kept.states = {}
        covered = min(kept.end, len(kept.tokens))
        if not sent.kv or not kept.first <= kept.stored.kv_tokens < covered:
            return sent
        block = max(kept.first, covered // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)
        kept.kv = [sent.kv[0][:, :, block - kept.first :].clone()]
        if sent.hidden and block >= kept.hidden_first:
            kept.hidden = [sent.hidden[0][:, block - kept.hidden_first :].clone()]
            kept.hidden_first = block
        kept.first = block
        kept.stored = replace(kept.stored, matched_tokens=covered, kv_tokens=covered)
        return sent

    def _send(self, sent: _Kept) -> None:
        """Runs on the sending thread; a failure is counted and logged, and nothing else."""
        try:
            with self.unstored.guarded("a prompt was not sent"):
                self._put(sent)
        finally:
            self._waiting.release()

    def _put(self, sent: _Kept) -> None:
        tokens = sent.tokens[: sent.end] if sent.kv else sent.tokens
        objects = self._objects(sent, PrefixChain(sent.namespace, tokens))
        timeout_s, tenant = self._put_timeout_s, self._tenant
        try:
            self._client.put(sent.namespace, tokens, objects, timeout_s=timeout_s, tenant=tenant)
        except StoreUnavailable as error:
            logger.debug("a prompt was not stored: %s", error)
            self.unstored.count("store_down")
        except TailReplayError as error:
            logger.warning("the store refused a prompt: %s", error)
            self.unstored.count("refused")

    def _objects(self, sent: _Kept, chain: PrefixChain) -> Iterator[ObjectBytes]:
        geometry = self._codec.geometry
        total = min(sent.end, len(sent.tokens))
        hidden_first = sent.hidden_first if sent.hidden else total
        pack: Callable[[], memoryview | Sequence[memoryview]]
        for kind, first, end in plan_put(sent.stored, total, hidden_first):
            if kind is Kind.KV:
                if not sent.kv or first < sent.first:
                    break
                rows = sent.kv[0][:, :, first - sent.first : end - sent.first]
                pack = partial(_pack_kv, rows)
            else:
                rows = sent.hidden[0][:, first - hidden_first : end - hidden_first]
                pack = partial(self._codec.hidden_parts, list(rows), 0, end - first)
            yield outgoing(sent.namespace, chain, geometry[kind], (first, end), pack)
        for tokens, units in sorted(sent.states.items()):
            span = (tokens - 1, tokens)
            pack = partial(_as_it_is, units)
            yield outgoing(sent.namespace, chain, geometry[Kind.CHECKPOINT], span, pack)


def _pack_kv(rows: Tensor) -> memoryview:
    """Payload of rows `[L, 2, T, H, d]`, in one copy."""
    payload = rows.permute(0, 3, 2, 1, 4).contiguous().flatten()
    return payload.view(torch.uint8).numpy().data


def _as_it_is(payload: memoryview) -> memoryview:
    return payload


def _joined(pieces: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(pieces, dim)] if len(pieces) > 1 else list(pieces)
