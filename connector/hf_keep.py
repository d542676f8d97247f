"""What of a prompt that has run stays in the GPU tier."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tailreplay.store.objects import PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.hf_run import Prefilled
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.store.chain import PrefixChain

HIDDEN_WINDOW_TOKENS = 2048
"""Hiddens are kept this far back from a prompt's end, where the next one is likely to part."""


def keep_on_device(
    pool: DevicePool, codec: PayloadCodec, chain: PrefixChain, done: Prefilled
) -> None:
    """Puts a prompt's whole pages and its states into the pool, the earliest as the latest used.

    A prefix is of use from its start on, so of one prompt the last pages go first.

    Args:
        pool: the GPU tier.
        codec: packs rows.
        chain: names the prompt's pages.
        done: exact results.
    """
    total = len(chain)
    page_bytes = {k: codec.geometry[k].payload_bytes(PAGE_TOKENS) for k in (Kind.KV, Kind.HIDDEN)}
    hidden_from = max(done.hidden_from, total - HIDDEN_WINDOW_TOKENS)
    for first in range(total // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS, -1, -PAGE_TOKENS):
        end = first + PAGE_TOKENS
        name = chain.prefix_hash(end)
        if done.hidden and first >= hidden_from:
            at = first - done.hidden_from
            rows = partial(codec.hidden_rows, done.hidden, at, at + PAGE_TOKENS)
            pool.put(pool.name(Kind.HIDDEN, name), page_bytes[Kind.HIDDEN], rows)
        rows = partial(codec.kv_rows, done.kv, first, end)
        pool.put(pool.name(Kind.KV, name), page_bytes[Kind.KV], rows)
    state_bytes = codec.geometry[Kind.CHECKPOINT].payload_bytes(1)
    for token, states in done.states.items():
        state = pool.name(Kind.CHECKPOINT, chain.prefix_hash(token))
        pool.put(state, state_bytes, partial(codec.checkpoint_rows, states))
