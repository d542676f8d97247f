"""Fills a store's index with prefixes that have no payload, and weighs an index.

A million blocks through Put would take an hour and 20 TB. What is inserted is what a Put inserts
(`TokenIndex.insert` of real prompts of random tokens), marked as if its payload were in Redis.
"""

import gc
import os
import time
import tracemalloc

import numpy as np

from store_parts.children import Answer, answer_commands, rss_bytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.core import Store
from tailreplay.store.evictor import Evictor
from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import KV_BLOCK_TOKENS
from tailreplay.store.prompt import Prompt
from tailreplay.store.record import IN_REDIS
from tailreplay.store.tokens import to_wire

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
    from store_parts import ours

    tokens_asked = ours.Prompt(prompt, tokens).tokens
    asked = Prompt(ours.NAMESPACE, tokens_asked, digest_key(ours.NAMESPACE))
    index: TokenIndex = catalog._index
    started_s = time.perf_counter()
    gc.disable()
    try:
        with catalog._lock:
            index.insert(asked, KV_BLOCK_TOKENS if siblings else tokens)
            _add_siblings(index, asked, siblings)
            grow(index, ours.NAMESPACE, blocks)
            _list(index)
    finally:
        gc.enable()
    return {"blocks": len(index), "build_s": time.perf_counter() - started_s}


def time_matches(store: Store, prompt: int, tokens: int, calls: int) -> Answer:
    """CPU of what the store's thread does for a lookup, without gRPC; others' work left out."""
    from store_parts import ours

    wire = to_wire(ours.Prompt(prompt, tokens).tokens)
    request = pb.MatchRequest(namespace=ours.NAMESPACE, tokens=wire)
    times = []
    for _ in range(calls):
        started_s = time.thread_time()
        store.match(request)
        times.append((time.thread_time() - started_s) * 1000)
    return {
        "store_cpu_p50_ms": float(np.median(times)),
        "store_cpu_p99_ms": float(np.percentile(times, 99)),
    }


def grow(index: TokenIndex, namespace: bytes, blocks: int) -> list[bytes]:
    """Adds conversations of random tokens; returns the name of the last block of each."""
    rng, leaves = np.random.default_rng(5), []
    for at in range(0, blocks, _CHAIN_BLOCKS):
        count = min(_CHAIN_BLOCKS, blocks - at) * KV_BLOCK_TOKENS
        tokens = rng.integers(0, 1 << 17, count, np.uint64)
        leaves.append(index.insert(Prompt(namespace, tokens, bytes(16))).prefix_hash)
    return leaves


def index_weight_child(blocks: int) -> None:
    """Role that weighs an index of its own; `tracemalloc` slows it, so that comes with few."""

    def weigh() -> Answer:
        rss, index = rss_bytes(os.getpid()), TokenIndex()
        leaves = grow(index, bytes(32), blocks)
        _list(index)
        grown = (rss_bytes(os.getpid()) - rss) / blocks
        rss, evictor = rss_bytes(os.getpid()), Evictor()
        for leaf in leaves:
            path = index.paths.to(bytes(32), leaf)
            evictor.use([*path.hidden, *path.kv])
        return {
            "rss_bytes_per_block": grown,
            "more_while_in_cpu_bytes_per_block": (rss_bytes(os.getpid()) - rss) / blocks,
            "blocks": len(index),
        }

    def trace(traced: int) -> Answer:
        grow(TokenIndex(), bytes(32), 1)  # what it imports is no part of an index
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


def _add_siblings(index: TokenIndex, asked: Prompt, count: int) -> None:
    rng = np.random.default_rng(3)
    for shared in rng.integers(KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS, count):
        tokens = asked.tokens[: 2 * KV_BLOCK_TOKENS].copy()
        tokens[shared:] = rng.integers(0, 1 << 17, len(tokens) - shared, np.uint64)
        index.insert(Prompt(asked.namespace, tokens, bytes(16)))


def _list(index: TokenIndex) -> None:
    """Says that the payload of everything is in Redis."""
    np.frombuffer(index.trees.objects.states, np.uint8)[:] = IN_REDIS
    np.frombuffer(index.trees.objects.sizes, np.int64)[:] = 8 << 20
    np.frombuffer(index.trees.objects.untils, np.uint32)[:] = (1 << 32) - 1
