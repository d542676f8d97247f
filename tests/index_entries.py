"""Prefixes in a token index, listed and lost by name."""

from collections.abc import Sequence
from itertools import takewhile

from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.record import Record
from tailreplay.store.views import Node

SPACE = bytes(32)


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Longest common prefix, by looking."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def insert(index: TokenIndex, prefix: Prefix) -> Node:
    return index.insert(prefix.prompt)


def store(index: TokenIndex, prefix: Prefix, *kinds: Kind) -> None:
    """Lists a prefix's blocks, with the payload of some kinds in the CPU tier."""
    insert(index, prefix)
    for kind, first, end in prefix.spans(*kinds):
        if kind is Kind.CHECKPOINT:
            record = checkpoint(index, prefix, end)
        else:
            record = index.find(prefix.prompt, kind, end)
        assert (record.first_token, record.end_token) == (first, end)
        record.in_cpu = True


def checkpoint(index: TokenIndex, prefix: Prefix, end: int) -> Record:
    return index.checkpoint_of(prefix.prompt, end)


def restore(index: TokenIndex, prefix: Prefix, end: int) -> Node:
    """Lists blocks as their manifests describe them; returns the last, or the root."""
    source = TokenIndex()
    nodes = [source.insert(prefix.prompt, at) for at in (0, *range(256, end, 256), end)]
    blocks = [source.block(prefix.prompt, node) for node in nodes]
    return [index.foreign.restore(block) for block in blocks][-1]


def lose(index: TokenIndex, record: Record) -> None:
    record.in_cpu = record.in_redis = False
    index.trees.prune(record)


def match(index: TokenIndex, ids, namespace: bytes = SPACE):
    return index.match(Prefix(namespace, ids).prompt)


def branch(ids, at: int, tail) -> list[int]:
    return [*ids[:at], ids[at] + 1_000_000, *tail]


BASE = list(range(4000))
