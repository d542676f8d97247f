"""Records are handles on rows: one for all who hold it, and never another object's."""

import gc

import pytest

from tailreplay.store.object_rows import Objects
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.record import Record

SPACE = bytes(32)


@pytest.fixture
def objects():
    return Objects()


def add(objects: Objects, number: int, kind: Kind = Kind.KV) -> int:
    return objects.add(kind, number.to_bytes(32, "big"), 256 * number, 256, number)


def test_a_record_is_the_same_for_all_who_hold_it(objects):
    row = add(objects, 1)
    record = objects.record(row, SPACE, b"")
    assert objects.record(row, SPACE, b"") is record
    record.in_cpu, record.size, record.provenance = True, 77, Provenance.APPROXIMATE
    del record
    gc.collect()
    again = objects.record(row, SPACE, b"")
    assert (again.in_cpu, again.in_redis, again.size) == (True, False, 77)
    assert again.provenance is Provenance.APPROXIMATE
    assert (again.first_token, again.end_token) == (256, 512)


def test_a_record_whose_row_is_another_object_s_now_is_still_what_it_was(objects):
    row = add(objects, 1)
    old = objects.record(row, SPACE, b"")
    old.in_cpu, old.size = True, 77
    old.tail_figures = b"123456"
    objects.free(row)
    assert add(objects, 2, Kind.HIDDEN) == row
    new = objects.record(row, SPACE, b"")
    new.in_redis, new.size = True, 99
    assert old is not new
    assert (old.name.kind, old.name.prefix_hash[-1]) == (Kind.KV, 1)
    assert (old.exists, old.is_listed, old.size, old.tail_figures) == (False, False, 77, b"")
    old.in_cpu = old.in_redis = True
    old.size, old.tail_figures = 5, b"654321"
    assert (old.exists, new.in_cpu, new.size, new.tail_figures) == (False, False, 99, b"")


def test_figures_of_several_lengths_keep_apart_and_their_room_is_used_again(objects):
    rows = [add(objects, number, Kind.HIDDEN) for number in range(4)]
    figures = [b"a" * 6, b"b" * 12, b"c" * 6, b""]
    for row, value in zip(rows, figures, strict=True):
        objects.note_figures(row, value)
    assert [objects.figures(row) for row in rows] == figures
    objects.note_figures(rows[0], b"")
    objects.note_figures(rows[3], b"d" * 6)
    objects.free(rows[1])
    assert [objects.figures(row) for row in rows] == [b"", b"", b"c" * 6, b"d" * 6]


def test_a_record_alone_is_as_it_was_made():
    record = Record(objects_name(), 0, 256, size=10)
    assert (record.size, record.exists, record.row) == (10, False, -1)


def objects_name():
    objects = Objects()
    return objects.record(add(objects, 3), SPACE, b"").name
