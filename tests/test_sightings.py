"""Names that were offered before, in bounded memory."""

from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.sightings import Sightings


def name(number, kind=Kind.KV):
    return ObjectName(bytes(32), kind, number.to_bytes(32, "big"))


def test_the_second_offer_is_again_and_kinds_differ():
    sightings = Sightings(100)
    assert [sightings.again(name(1)) for _ in range(3)] == [False, True, True]
    assert not sightings.again(name(1, Kind.HIDDEN))


def test_names_are_forgotten_in_the_order_they_came_and_no_more_are_kept():
    sightings = Sightings(100)
    for number in range(250):
        assert not sightings.again(name(number))
    assert sightings.again(name(249))
    assert sightings.again(name(100))
    assert not sightings.again(name(99))
    assert len(sightings._now) + len(sightings._before) <= 200


def test_who_is_offered_again_and_again_is_not_forgotten():
    sightings = Sightings(10)
    sightings.again(name(0))
    for number in range(1, 100):
        sightings.again(name(number))
        assert sightings.again(name(0))
