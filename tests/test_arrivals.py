"""How what a Put has brought is listed: counted once, and in order of eviction from then on."""

import numpy as np
import pytest

from tailreplay.store.arrivals import Arrivals, Arrived
from tailreplay.store.claims import Claims
from tailreplay.store.eviction_order import EvictionOrder
from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind, ObjectName, Provenance
from tailreplay.store.prompt import Prompt
from tailreplay.store.quota import Quotas
from tailreplay.store.sums import Sums

SPACE = bytes(range(32))
KV, HIDDEN, CHECKPOINT = Kind


class Listing:
    """What a catalog has, without its lock."""

    def __init__(self):
        self.index, self.quotas = TokenIndex(), Quotas()
        self.quotas.own(SPACE, b"")
        self.sums, self.order = Sums(self.quotas), EvictionOrder(self.quotas)
        self.claims = Claims(to_redis=False)
        self.arrivals = Arrivals(self.index, self.sums, self.order, self.claims)

    def put(self, tokens: int, *objects: tuple[Kind, int], size=1000, provenance=Provenance.EXACT):
        prompt = Prompt(SPACE, np.arange(tokens, dtype=np.uint64), bytes(16))
        arrived = []
        for kind, end in objects:
            name = ObjectName(SPACE, kind, prompt.chain.prefix_hash(end))
            self.claims.claim(name, size)
            arrived.append(Arrived(name, end, size, provenance))
        return self.arrivals.list(prompt, arrived)

    def next_to_go(self) -> list[tuple[Kind, int]]:
        victims = self.order.victims(1 << 60, None, lambda _: False)
        return [(record.name.kind, record.end_token) for record in victims]


@pytest.fixture
def listing() -> Listing:
    return Listing()


def test_of_what_comes_together_the_last_tokens_go_first(listing):
    assert listing.put(700, (KV, 256), (KV, 512), (KV, 700), (CHECKPOINT, 650)) == [True] * 4
    assert listing.next_to_go() == [(KV, 700), (CHECKPOINT, 650), (KV, 512), (KV, 256)]
    assert not len(listing.claims)


def test_what_an_exact_object_replaces_is_no_longer_counted(listing):
    listing.put(256, (KV, 256), size=1000, provenance=Provenance.APPROXIMATE)
    listing.put(256, (KV, 256), size=5000)
    assert listing.sums.by_tier() == {("cpu", KV): (1, 5000)}
    assert listing.sums.pooled() == {SPACE: (256, 8192)}
    assert listing.sums.kv_blocks == 1
    assert listing.quotas.bytes_of(b"", "cpu") == 5000


def test_a_page_is_the_one_that_ends_where_it_was_said_to(listing):
    listing.put(600, *[(HIDDEN, end) for end in (128, 64, 600, 576)])
    hidden = [r for r in listing.index.sweep.all() if r.exists]
    assert {(r.first_token, r.end_token) for r in hidden} == {
        (0, 64),
        (64, 128),
        (512, 576),
        (576, 600),
    }
    prompt = Prompt(SPACE, np.arange(600, dtype=np.uint64), bytes(16))
    assert all(r.name.prefix_hash == prompt.chain.prefix_hash(r.end_token) for r in hidden)


def test_a_partial_block_goes_next_once_a_longer_one_extends_it(listing):
    listing.put(256, (KV, 256))  # would go first, being older
    listing.put(256 + 100, (KV, 356), (HIDDEN, 320), (HIDDEN, 356))
    listing.put(256 + 200, (KV, 456), (HIDDEN, 384), (HIDDEN, 448))
    assert set(listing.next_to_go()[:2]) == {(KV, 356), (HIDDEN, 356)}
