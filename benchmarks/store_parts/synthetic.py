"""Fills a store's index with prefixes that have no payload, and weighs an index.

A million blocks through Put would take an hour and 20 TB. What is inserted is what a Put inserts
(`TokenIndex.insert`, 64-bit digests, 32-byte names), marked as if its payload were in Redis; only
the digests of all but one prompt are random instead of computed.
"""

import gc
import os
import time
import tracemalloc
from typing import Any

import numpy as np

from store_parts.children import Answer, answer_commands, rss_bytes
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import DIGEST_BYTES, digest_key, running_digests
from tailreplay.store.evictor import Evictor
from tailreplay.store.index import Node, TokenIndex
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS

_CHAIN_BLOCKS = 512


def synthesize(catalog: Catalog, prompt: int, tokens: int, blocks: int, siblings: int) -> Answer:
    """Lists a prompt's first blocks among very many others.

    Args:
        catalog: whose index is filled. There is no public way in: this reaches for its index and
            lock, and would rather be given an index at construction.
        prompt: number of the `store_parts.ours.Prompt` that Match calls will ask for.
        tokens: its length.
        blocks: blocks to list, in conversations of 512 that share nothing.
        siblings: children of the prompt's first block, each sharing up to 255 tokens with its
            second; 0 lists the whole prompt instead.
    """
    from store_parts.ours import NAMESPACE, Prompt

    asked = Prompt(prompt, tokens)
    digests = running_digests(digest_key(NAMESPACE), asked.tokens)
    index: TokenIndex = catalog._index
    started_s = time.perf_counter()
    gc.disable()
    try:
        with catalog._lock:
            end = KV_BLOCK_TOKENS if siblings else tokens
            _list(index.insert(NAMESPACE, digests[: end * DIGEST_BYTES], asked.chain.prefix_hash))
            _add_siblings(index, NAMESPACE, digests, siblings)
            grow(index, NAMESPACE, blocks)
    finally:
        gc.enable()
    return {"blocks": len(index), "build_s": time.perf_counter() - started_s}


def grow(index: TokenIndex, namespace: bytes, blocks: int) -> list[Node]:
    """Adds conversations of random digests; returns the last block of each."""
    leaves = []
    for at in range(0, blocks, _CHAIN_BLOCKS):
        count = min(_CHAIN_BLOCKS, blocks - at)
        digests = os.urandom(count * KV_BLOCK_TOKENS * DIGEST_BYTES)
        leaves.append(index.insert(namespace, digests, _Names(count * KV_BLOCK_TOKENS)))
        _list(leaves[-1])
    return leaves


def index_weight_child(blocks: int) -> None:
    """Role that weighs an index of its own; `tracemalloc` slows it, so that comes with few."""

    def weigh() -> Answer:
        rss, index = rss_bytes(os.getpid()), TokenIndex()
        leaves = grow(index, bytes(32), blocks)
        grown = (rss_bytes(os.getpid()) - rss) / blocks
        rss, evictor = rss_bytes(os.getpid()), Evictor()
        for leaf in leaves:
            for node in index.path_to(bytes(32), leaf.prefix_hash):
                evictor.use([record for record in (node.kv, *node.hidden) if record is not None])
        return {
            "rss_bytes_per_block": grown,
            "evictor_rss_bytes_per_block": (rss_bytes(os.getpid()) - rss) / blocks,
            "blocks": len(index),
        }

    def trace(traced: int) -> Answer:
        index = TokenIndex()
        tracemalloc.start()
        grow(index, bytes(32), traced)
        snapshot = tracemalloc.take_snapshot()
        tracemalloc.stop()
        lines: dict[str, float] = {}
        for stat in snapshot.statistics("lineno")[:8]:
            frame = stat.traceback[0]
            lines[f"{os.path.basename(frame.filename)}:{frame.lineno}"] = stat.size / traced
        total = sum(stat.size for stat in snapshot.statistics("filename"))
        return {"traced_bytes_per_block": total / traced, "by_line": lines}

    answer_commands({}, {"weigh": weigh, "trace": trace})


class _Names:
    """Random prefix hashes, the same for the same length, as `PrefixChain.prefix_hash` gives."""

    def __init__(self, tokens: int) -> None:
        self._names = os.urandom(32 * (tokens // PAGE_TOKENS + 1))

    def __call__(self, end_token: int) -> bytes:
        at = end_token // PAGE_TOKENS * 32
        return self._names[at : at + 32]


def _add_siblings(index: TokenIndex, namespace: bytes, digests: bytes, count: int) -> None:
    rng = np.random.default_rng(3)
    first, second = (
        digests[i * KV_BLOCK_TOKENS * DIGEST_BYTES : (i + 1) * KV_BLOCK_TOKENS * DIGEST_BYTES]
        for i in range(2)
    )
    for shared in rng.integers(0, KV_BLOCK_TOKENS, count):
        kept = second[: int(shared) * DIGEST_BYTES]
        block = kept + os.urandom(len(second) - len(kept))
        _list(index.insert(namespace, first + block, _Names(2 * KV_BLOCK_TOKENS)))


def _list(leaf: Node) -> None:
    """Says that the payload of a block and of those before it is in Redis."""
    node: Node | None = leaf
    while node is not None and node.parent is not None:
        records: list[Any] = [node.kv, *node.hidden]
        if records[0].in_redis:
            return
        for record in records:
            record.in_redis = True
            record.size = 8 << 20
        node = node.parent
