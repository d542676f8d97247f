"""The order of eviction: least recently used first, late blocks of a prefix before early ones."""

import pytest
from store_objects import Prefix

from tailreplay.store.evictor import Evictor
from tailreplay.store.objects import Kind
from tailreplay.store.record import Record


def records(seed: int, count: int = 4, size: int = 10) -> list[Record]:
    prefix = Prefix(bytes(32), [seed] * count * 256)
    return [
        Record(prefix.name(kind, end), first, end - first, size=size)
        for kind, first, end in prefix.spans(Kind.KV)
    ]


@pytest.fixture
def evictor():
    return Evictor()


def test_late_blocks_of_one_use_go_first(evictor):
    first, second, third, last = records(1)
    evictor.use([third, first, last, second])
    assert evictor.victims(40) == [last, third, second, first]
    assert evictor.victims(11) == [last, third]


def test_the_least_recently_used_prefix_goes_before_a_later_one(evictor):
    old, new = records(1), records(2)
    evictor.use(old)
    evictor.use(new)
    assert evictor.victims(80) == [*reversed(old), *reversed(new)]
    evictor.use(old)
    assert evictor.victims(80) == [*reversed(new), *reversed(old)]


def test_what_is_demoted_goes_next(evictor):
    first, *_ = records(1)
    evictor.use(records(2))
    evictor.use([first])
    evictor.demote(first)
    assert evictor.victims(1) == [first]


def test_what_has_left_is_not_chosen_and_can_not_be_demoted(evictor):
    first, second, *_ = records(1)
    evictor.use([first, second])
    evictor.forget(second)
    evictor.forget(second)
    evictor.demote(second)
    assert (evictor.victims(1000), len(evictor)) == ([first], 1)


def test_what_must_stay_is_passed_over(evictor):
    first, second, third, last = records(1)
    evictor.use([first, second, third, last])
    assert evictor.victims(20, spare=lambda r: r in (last, second)) == [third, first]


def test_nothing_is_chosen_when_no_room_is_wanted(evictor):
    evictor.use(records(1))
    assert evictor.victims(0) == []
