"""What of a prompt that has run stays in the GPU tier."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tailreplay.connector.device_pool import HIDDEN_WINDOW_TOKENS
from tailreplay.store.objects import PAGE_TOKENS, Kind, ObjectName

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.hf_run import Prefilled
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.store.chain import PrefixChain


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
    hidden_from = max(done.hidden_from, total - HIDDEN_WINDOW_TOKENS)
    for first in range(total // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS, -1, -PAGE_TOKENS):
        end = first + PAGE_TOKENS
        if done.hidden and first >= hidden_from:
            at = first - done.hidden_from
            rows = partial(codec.hidden_rows, done.hidden, at, at + PAGE_TOKENS)
            _put(pool, codec, chain, (Kind.HIDDEN, end), rows)
        _put(pool, codec, chain, (Kind.KV, end), partial(codec.kv_rows, done.kv, first, end))
    for token, states in done.states.items():
        _put(pool, codec, chain, (Kind.CHECKPOINT, token), partial(codec.checkpoint_rows, states))


def _put(
    pool: DevicePool,
    codec: PayloadCodec,
    chain: PrefixChain,
    what: tuple[Kind, int],
    rows: Callable[[], Tensor],
) -> None:
    """Puts one object, named by its kind and the token at its end."""
    kind, end = what
    geometry = codec.geometry[kind]
    count = 1 if kind is Kind.CHECKPOINT else PAGE_TOKENS
    name = ObjectName(chain.namespace, kind, chain.prefix_hash(end))
    pool.put([name], (geometry.units, count, geometry.row_bytes), lambda _: rows()[None])
