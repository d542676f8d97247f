"""club-3090 PR 1170: a pool for 530,000 tokens was full at 400,000, since states were not counted.

`describe` says a capacity in tokens; so many fit, within 5%, whatever is stored beside the keys and
values.
"""

import os

import pytest
from store_objects import Prefix, put_frames

from tailreplay.store import serve_in_thread
from tailreplay.store.objects import Kind

KV, HIDDEN, CHECKPOINT = Kind
TOKENS = 700
POOL_BYTES = 8 << 20


@pytest.fixture(scope="module")
def small_store():
    with serve_in_thread(pool_bytes=POOL_BYTES) as server:
        yield server.store


def kv_tokens(store, prefixes) -> int:
    """Tokens of prompts whose keys and values are all there."""
    return sum(
        TOKENS
        for prefix in prefixes
        if all(store.catalog.record(prefix.name(KV, end)) for _, _, end in prefix.spans(KV))
    )


@pytest.mark.parametrize("kinds", [(KV,), (KV, HIDDEN), (KV, HIDDEN, CHECKPOINT)])
def test_as_many_tokens_fit_as_describe_says(small_store, kinds):
    store, space = small_store, os.urandom(32)
    store.catalog.room.make(store.tiers.pool_bytes)
    evicted_bytes = store.stats().evicted_bytes
    prefixes: list[Prefix] = []

    def put() -> None:
        prefixes.append(Prefix(space, [len(prefixes), *range(TOKENS - 1)]))
        spans = prefixes[-1].spans(*kinds)
        if CHECKPOINT in kinds:  # every 64 tokens one
            spans += [(CHECKPOINT, end - 1, end) for end in range(64, TOKENS, 64)]
        assert store.put(put_frames(prefixes[-1], spans), lambda: None).dropped == 0

    put()
    (described,) = (n for n in store.describe().namespaces if n.namespace == space)
    while store.stats().evicted_bytes == evicted_bytes:
        put()
    fits = kv_tokens(store, prefixes)
    assert abs(described.capacity_tokens - fits) <= 0.05 * fits + TOKENS
