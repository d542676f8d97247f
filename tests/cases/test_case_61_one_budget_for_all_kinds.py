"""sglang PR 39436: a pool split between keys and states hit nothing with a third of it empty.

Kinds share one budget: whichever comes fills the whole pool, and takes what another leaves.
"""

import os

import pytest
from store_objects import Prefix, put_frames

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

KV, HIDDEN, CHECKPOINT = Kind
TOKENS = 1024


@pytest.fixture(scope="module")
def small_store():
    with serve_in_thread(pool_bytes=4 << 20) as server:
        yield server.store


def put(store, *kinds: Kind) -> None:
    prefix = Prefix(os.urandom(32), range(TOKENS))
    spans = prefix.spans(*kinds)
    if CHECKPOINT in kinds:
        spans = [(CHECKPOINT, end - 1, end) for end in range(1, TOKENS, 16)]
    assert store.put(put_frames(prefix, spans), lambda: None).dropped == 0


def fill(store, kind: Kind) -> float:
    """Puts objects of a kind until the first eviction; returns how full the pool was just then."""
    before, full = store.stats().evicted_bytes, 0.0
    while store.stats().evicted_bytes == before:
        full = max(full, store.tiers.used_bytes / store.tiers.pool_bytes)
        put(store, kind)
    return full


@pytest.mark.parametrize("kind", Kind)
def test_one_kind_alone_fills_the_pool(small_store, kind):
    small_store.catalog.room.make(small_store.tiers.pool_bytes)
    assert fill(small_store, kind) > 0.9


@pytest.mark.parametrize(("first", "then"), [(KV, HIDDEN), (HIDDEN, KV), (KV, CHECKPOINT)])
def test_a_kind_takes_the_room_of_another_while_the_pool_is_full(small_store, first, then):
    store = small_store
    store.catalog.room.make(store.tiers.pool_bytes)
    fill(store, first)
    while ("cpu", first) in store.catalog.tier_figures():
        used = store.tiers.used_bytes / store.tiers.pool_bytes
        assert used > 0.7, "room is empty while objects are evicted"
        put(store, then)
    assert store.tiers.used_bytes / store.tiers.pool_bytes > 0.7
