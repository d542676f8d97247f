"""What the index lists of Redis: for as long as it is there, and for as much as there is room."""

import numpy as np
import pytest
from store_objects import Prefix
from waiting import Clock

from tailreplay.store.index import TokenIndex
from tailreplay.store.manifest_form import Entry
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.prompt import Prompt
from tailreplay.store.record import Record
from tailreplay.store.redis_listing import RedisListing
from tailreplay.store.shared_index import Beyond, Found

SPACE = bytes(32)


def place(record: Record, *, in_redis: bool) -> None:
    record.in_redis = in_redis


class Listed:
    """An index, and what a Redis says is in it."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.clock = Clock()
        self.index = TokenIndex()
        self.listing = RedisListing(self.index, place, self.clock, max_blocks)

    def restore(self, prompt: Prompt, life_s: float) -> None:
        source = TokenIndex()
        for end in range(0, len(prompt) + 1, 256):
            block = source.block(prompt, source.insert(prompt, end))
            entries = [Entry("k", 100, Provenance.EXACT, life_s=life_s)] if end else []
            self.listing.restore(block, entries)

    def forget(self) -> int:
        """Forgets step by step; returns how many."""
        forgotten, row = self.listing.forget_some(0)
        while row:
            more, row = self.listing.forget_some(row)
            forgotten += more
        return forgotten

    def matched(self, prompt: Prompt) -> int:
        return self.index.match(prompt).matched_tokens


@pytest.fixture
def listed():
    return Listed()


def prompt_of(number: int, blocks: int) -> Prompt:
    return Prefix(SPACE, [number, *range(256 * blocks - 1)]).prompt


def test_what_was_read_at_the_start_is_listed_for_the_rest_of_its_life(listed):
    short, long = prompt_of(1, 2), prompt_of(2, 3)
    listed.restore(short, 50)
    listed.restore(long, 80)
    listed.clock.now_s += 49
    assert listed.forget() == 0
    listed.clock.now_s += 2
    assert listed.forget() == 2
    assert (listed.matched(short), listed.matched(long)) == (0, 768)
    listed.clock.now_s += 30
    assert listed.forget() == 3
    assert len(listed.index) == len(listed.index.trees.objects) == 0
    assert listed.index.trees.sizes() == {}


def test_what_the_cpu_tier_has_too_stays(listed):
    prompt = prompt_of(1, 1)
    listed.restore(prompt, 50)
    record = next(r for r in listed.index.sweep.all() if r.exists)
    record.in_cpu = True
    listed.clock.now_s += 51
    assert listed.forget() == 1
    assert (record.in_cpu, record.in_redis) == (True, False)
    assert listed.matched(prompt) == 256


def test_what_was_read_in_a_lookup_is_asked_for_again_after_ten_minutes(listed):
    prompt = prompt_of(1, 2)
    source = TokenIndex()
    blocks = [source.block(prompt, source.insert(prompt, end)) for end in (256, 512)]
    entries = [Entry("k", 100, Provenance.EXACT)]
    beyond = Beyond(0, [], [Found(block, entries) for block in blocks], None)
    listed.listing.learn(prompt, beyond)
    listed.clock.now_s += 599
    assert listed.forget() == 0
    assert listed.matched(prompt) == 512
    listed.clock.now_s += 2
    assert listed.forget() == 2
    assert listed.matched(prompt) == 0


def test_an_exact_object_in_redis_takes_the_place_of_an_approximate_one_there(listed):
    prompt = prompt_of(1, 1)
    source = TokenIndex()
    block = source.block(prompt, source.insert(prompt, 256))

    def learn(size: int, provenance: Provenance) -> tuple[int, Provenance]:
        found = Found(block, [Entry("k", size, provenance)])
        listed.listing.learn(prompt, Beyond(0, [], [found], None))
        record = next(r for r in listed.index.sweep.all() if r.exists)
        return record.size, record.provenance

    assert learn(100, Provenance.APPROXIMATE) == (100, Provenance.APPROXIMATE)
    assert learn(120, Provenance.EXACT) == (120, Provenance.EXACT)
    assert learn(100, Provenance.APPROXIMATE) == (120, Provenance.EXACT)


def test_an_answer_in_parts_is_the_whole_answer(listed):
    prompt = prompt_of(1, 7)
    source = TokenIndex()
    blocks = [source.block(prompt, source.insert(prompt, end)) for end in range(256, 1793, 256)]
    found = [Found(block, [Entry("k", 100, Provenance.EXACT)]) for block in blocks]
    parts = list(Beyond(0, [], found[:6], found[6]).parts(4))
    assert [len(part.whole) for part in parts] == [4, 2]
    for part in parts:
        listed.listing.learn(prompt, part)
    assert listed.matched(prompt) == 7 * 256


def test_above_its_size_the_index_forgets_what_expires_first():
    listed = Listed(max_blocks=100)
    for number in range(30):
        listed.restore(prompt_of(number, 5), life_s=1000 + number)
    assert len(listed.index) == 150
    listed.forget()
    left = [number for number in range(30) if listed.matched(prompt_of(number, 5))]
    assert left == list(range(30 - len(left), 30))
    assert 80 <= len(listed.index) <= 100
    assert listed.forget() == 0


def test_what_the_cpu_tier_has_is_not_forgotten_for_room():
    listed = Listed(max_blocks=10)
    for number in range(10):
        listed.restore(prompt_of(number, 5), life_s=1000)
    np.frombuffer(listed.index.trees.objects.states, np.uint8)[:] |= 1
    listed.forget()
    assert len(listed.index) == 50
    assert {r.in_redis for r in listed.index.sweep.all() if r.name.kind is Kind.KV} == {True}


def test_very_much_that_expires_at_once_is_forgotten_a_little_at_a_time(listed):
    for number in range(20):
        listed.restore(prompt_of(number, 50), life_s=10)
    listed.clock.now_s += 11
    steps, row = [], 0
    while row or not steps:
        forgotten, row = listed.listing.forget_some(row)
        steps.append(forgotten)
    assert max(steps) <= 256
    assert (sum(steps), len(listed.index)) == (1000, 0)
