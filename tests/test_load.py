"""A load gives whole, right rows, or fails with a reason; what a buffer held before never shows."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_objects import GEOMETRY, Prefix, span_range

from tailreplay.connector.load import Load, LoadFailed
from tailreplay.connector.step import step_of
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.objects import Kind

POISON = 0xFF
"""Bytes of a NaN in every dtype."""

TOKENS = 600
PROMPT = Prefix(bytes(32), range(TOKENS))
OTHER = Prefix(bytes(32), range(1, TOKENS + 1))

KV = span_range(Kind.KV, 0, 512, first_unit=2, units=2)
HIDDEN = span_range(Kind.HIDDEN, 130, 256, first_unit=1, units=1)
STATE = span_range(Kind.CHECKPOINT, 511, 512, prefix_hash=PROMPT.chain.prefix_hash(512))


@dataclass
class Stream:
    """Frames as a store would send them; what happens after the last is up to the test."""

    frames: list[pb.FetchFrame]
    error: Exception | None = None
    hold: threading.Event | None = None
    calls: list[str] = field(default_factory=list)

    def __iter__(self):
        yield from map(step_of, self.frames)
        if self.hold is not None:
            self.hold.wait(20)
        if self.error is not None:
            raise self.error

    def cancel(self):
        self.calls.append("cancel")
        if self.hold is not None:
            self.hold.set()

    def report_damage(self, kind, prefix_hash):
        self.calls.append((kind, prefix_hash))

    def stalled(self):
        self.calls.append("stalled")
        self.cancel()


def rows(number, wanted, first, end, unit=0, units=None, prefix=PROMPT, name=None, **changes):
    """A frame with rows [first, end) of some of the units a range wants."""
    kind = Kind(wanted.kind)
    units = wanted.units if units is None else units
    first_unit = wanted.first_unit + unit
    geometry = GEOMETRY[kind]
    units = units or geometry.units - first_unit
    data = prefix.rows(kind, first, end, first_unit, units)
    fields = {
        "range": number,
        "first_unit": first_unit,
        "units": units,
        "first_token": first,
        "rows": end - first,
        "data": data,
        "crc32c": crc32c(data),
        "tier": pb.TIER_CPU,
        "row_bytes": geometry.row_bytes,
        "prefix_hash": name or prefix.chain.prefix_hash(end),
    }
    return pb.FetchFrame(rows=pb.Rows(**(fields | changes)))


def ended(number):
    return pb.FetchFrame(range_end=pb.RangeEnd(range=number))


def load_of(*ranges, stall_timeout_s=20.0, events=None):
    load = Load(
        ranges,
        GEOMETRY,
        PROMPT.chain,
        stall_timeout_s=stall_timeout_s,
        on_event=lambda name, wanted: events is not None and events.append((name, wanted)),
    )
    for buffer in load.buffers:
        buffer[:] = POISON
    return load


def reason_of(load, number=0):
    with pytest.raises(LoadFailed) as failure:
        load.wait(number)
    return failure.value.reason


def run(load, *frames, **stream):
    stream = Stream(list(frames), **stream)
    load.run(stream)
    return stream


def assert_whole(load, number, wanted):
    kind = Kind(wanted.kind)
    units = wanted.units or GEOMETRY[kind].units - wanted.first_unit
    right = PROMPT.rows(kind, wanted.first_token, wanted.end_token, wanted.first_unit, units)
    assert load.wait(number).tobytes() == right


def test_ranges_come_whole_in_their_own_buffers():
    events = []
    load = load_of(STATE, HIDDEN, KV, events=events)
    run(
        load,
        pb.FetchFrame(lease=pb.LeaseGranted(lease_id=b"x")),
        rows(0, STATE, 511, 512),
        ended(0),
        rows(1, HIDDEN, 130, 192),
        rows(1, HIDDEN, 192, 256),
        ended(1),
        rows(2, KV, 0, 256),
        rows(2, KV, 256, 512, tier=pb.TIER_REDIS),
        ended(2),
    )
    for number, wanted in enumerate((STATE, HIDDEN, KV)):
        assert_whole(load, number, wanted)
    assert events == [
        (name, wanted) for wanted in (STATE, HIDDEN, KV) for name in ("first_rows", "complete")
    ]
    half = load.buffers[2].size // 2
    assert load.bytes_by_tier() == {
        ("cpu", Kind.CHECKPOINT): load.buffers[0].size,
        ("cpu", Kind.HIDDEN): load.buffers[1].size,
        ("cpu", Kind.KV): half,
        ("redis", Kind.KV): half,
    }


@st.composite
def tiles(draw):
    """A range cut into pieces by token and unit, in some order."""
    cuts = sorted(draw(st.sets(st.integers(1, 511), max_size=5)))
    pieces = []
    for first, end in zip([0, *cuts], [*cuts, 512], strict=True):
        split = draw(st.booleans())
        pieces += [(first, end, 0, 1), (first, end, 1, 1)] if split else [(first, end, 0, 2)]
    return draw(st.permutations(pieces))


@given(tiles(), st.data())
@settings(max_examples=50)
def test_however_a_range_is_cut_it_is_whole_or_it_fails(pieces, data):
    frames = [rows(0, KV, first, end, unit, units) for first, end, unit, units in pieces]
    load = load_of(KV)
    run(load, *frames, ended(0))
    assert_whole(load, 0, KV)

    gone = data.draw(st.sampled_from(range(len(frames))))
    holed = load_of(KV)
    run(holed, *frames[:gone], *frames[gone + 1 :], ended(0))
    assert reason_of(holed) == "integrity"


@given(tiles(), st.data())
@settings(max_examples=50)
def test_rows_that_come_twice_never_hide_a_hole(pieces, data):
    frames = [rows(0, KV, first, end, unit, units) for first, end, unit, units in pieces]
    twice = data.draw(st.sampled_from(range(len(frames))))
    load = load_of(KV)
    stream = run(load, *frames[: twice + 1], frames[twice], ended(0))
    assert reason_of(load) == "integrity"
    assert stream.calls == ["cancel"]


def test_rows_after_the_end_of_a_range_do_not_touch_what_was_given_out():
    load = load_of(HIDDEN)
    whole = rows(0, HIDDEN, 130, 256)
    run(load, whole, ended(0), rows(0, HIDDEN, 130, 256, prefix=OTHER))
    assert_whole(load, 0, HIDDEN)


damaged = [
    ("a flipped bit", {"crc32c": 1}),
    ("other rows than announced", {"rows": 127}),
    ("another row size", {"row_bytes": 16}),
    ("a row size that fits the data", {"row_bytes": 64, "rows": 64}),
    ("no rows", {"rows": 0, "data": b"", "crc32c": 0}),
    ("no units", {"units": 0, "data": b"", "crc32c": 0}),
    ("truncated data", {"data": b"\0" * 32, "crc32c": crc32c(b"\0" * 32)}),
    ("an unknown range", {"range": 7}),
    ("rows before the range", {"first_token": 129}),
    ("rows behind the range", {"first_token": 131}),
    ("units before the range", {"first_unit": 0}),
    ("the name of another prefix", {"prefix_hash": OTHER.chain.prefix_hash(256)}),
    ("no name", {"prefix_hash": b""}),
]
reported = {"a flipped bit", "truncated data"}
"""What the store may have to do with, and is told."""


@pytest.mark.parametrize(("what", "changes"), damaged, ids=[name for name, _ in damaged])
def test_a_wrong_frame_fails_every_range_that_is_not_complete(what, changes):
    load = load_of(STATE, HIDDEN, KV)
    frame = rows(1, HIDDEN, 130, 256)
    for field_name, value in changes.items():
        setattr(frame.rows, field_name, value)
    stream = run(load, rows(0, STATE, 511, 512), ended(0), frame, ended(1), rows(2, KV, 0, 256))
    assert_whole(load, 0, STATE)
    assert reason_of(load, 1) == reason_of(load, 2) == "integrity"
    told = [(Kind.HIDDEN, PROMPT.chain.prefix_hash(256))] if what in reported else []
    assert stream.calls == ["cancel", *told]
    assert (load.buffers[2] == POISON).all()


def test_a_state_of_another_token_is_refused():
    load = load_of(STATE)
    run(load, rows(0, STATE, 510, 511), ended(0))
    assert reason_of(load) == "integrity"
    load = load_of(STATE)
    run(load, rows(0, STATE, 511, 512, name=PROMPT.chain.prefix_hash(511)), ended(0))
    assert reason_of(load) == "integrity"


def test_whole_blocks_must_bear_our_name_and_the_last_part_may_be_of_a_longer_sibling():
    wanted = span_range(Kind.KV, 0, 300, units=4)
    longer = Prefix(bytes(32), [*range(300), *range(7, 250)])
    part = rows(0, wanted, 256, 300, name=longer.chain.prefix_hash(512))
    load = load_of(wanted)
    run(load, rows(0, wanted, 0, 256), part, ended(0))
    assert_whole(load, 0, wanted)
    load = load_of(wanted)
    run(load, rows(0, wanted, 0, 256, name=OTHER.chain.prefix_hash(256)), part, ended(0))
    assert reason_of(load) == "integrity"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (pb.MISS_REASON_EVICTED, "evicted"),
        (pb.MISS_REASON_INTEGRITY, "integrity"),
        (pb.MISS_REASON_DEADLINE, "deadline"),
        (pb.MISS_REASON_NO_ROOM, "no_room"),
    ],
)
def test_what_the_store_misses_fails_its_range_alone(sent, reason):
    load = load_of(HIDDEN, STATE)
    missing = pb.Missing(range=0, first_token=130, end_token=192, reason=sent)
    run(load, pb.FetchFrame(missing=missing), rows(1, STATE, 511, 512), ended(1))
    assert reason_of(load, 0) == reason
    assert_whole(load, 1, STATE)


@pytest.mark.parametrize("frame", [ended(1), pb.FetchFrame(missing=pb.Missing(range=1))])
def test_a_frame_of_no_range_fails_the_load(frame):
    load = load_of(HIDDEN)
    run(load, frame, rows(0, HIDDEN, 130, 256), ended(0))
    assert reason_of(load) == "integrity"


def test_a_stream_that_ends_early_has_lost_the_rest():
    load = load_of(HIDDEN)
    run(load, rows(0, HIDDEN, 130, 192))
    assert reason_of(load) == "evicted"


def test_a_stream_that_breaks_is_a_store_that_is_down():
    load = load_of(STATE, HIDDEN)
    run(load, rows(0, STATE, 511, 512), ended(0), error=StoreUnavailable("gone"))
    assert_whole(load, 0, STATE)
    assert reason_of(load, 1) == "store_down"


def test_a_range_that_the_store_does_not_have_in_this_shape_is_a_mismatch():
    load = load_of(STATE)
    run(load, error=InvalidRequest("wants units [0, 9) of 4"))
    assert reason_of(load) == "integrity"


def test_a_stream_that_brings_nothing_any_more_is_given_up_and_told_so():
    load = load_of(STATE, HIDDEN, stall_timeout_s=0.5)
    stream = Stream([rows(0, STATE, 511, 512), ended(0)], hold=threading.Event())
    reader = threading.Thread(target=load.run, args=(stream,))
    reader.start()
    assert_whole(load, 0, STATE)
    assert reason_of(load, 1) == "deadline"
    reader.join(20)
    assert not reader.is_alive()
    assert stream.calls[:2] == ["stalled", "cancel"]


def test_a_load_that_was_cancelled_before_it_ran_ends_its_stream():
    load = load_of(HIDDEN)
    load.cancel()
    stream = run(load, rows(0, HIDDEN, 130, 192))
    assert stream.calls == ["cancel"]
    assert reason_of(load) == "evicted"


def test_a_waiter_wakes_when_its_range_is_complete_not_when_all_are():
    load = load_of(HIDDEN, KV)
    stream = Stream([rows(0, HIDDEN, 130, 256), ended(0)], hold=threading.Event())
    reader = threading.Thread(target=load.run, args=(stream,))
    reader.start()
    assert_whole(load, 0, HIDDEN)
    assert (load.buffers[1] == POISON).all()
    load.cancel()
    reader.join(20)
    assert reason_of(load, 1) == "evicted"


def test_buffers_are_as_large_as_what_is_asked_for():
    wanted = span_range(Kind.HIDDEN, 64, 100)
    load = load_of(KV, wanted)
    assert [b.shape for b in load.buffers] == [(2, 512, 32), (2, 36, 32)]
    assert all(b.dtype == np.uint8 for b in load.buffers)
