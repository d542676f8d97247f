"""What a Fetch loads from Redis while it sends: how much, and what becomes of it."""

import threading
from contextlib import closing

import pytest
from store_objects import GEOMETRY, Prefix, put_frames, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.geometry import Dtype, kv_geometry
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.reserved import Reserved

pytestmark = pytest.mark.redis

MIB = 1 << 20
BLOCKS, WINDOW_BLOCKS = 24, 3
TOKENS = BLOCKS * 256
WIDE = kv_geometry(fa_layers=2, kv_heads=2, head_dim=32, dtype=Dtype.FLOAT32)
"""A block of 256 KiB and a header, so that a window of 1 MiB has three."""

PREFIX = Prefix(bytes(32), range(TOKENS), GEOMETRY | {Kind.KV: WIDE})
OTHER = Prefix(bytes(31) + b"\1", range(TOKENS), GEOMETRY | {Kind.KV: WIDE})


@pytest.fixture
def store(redis_server, tmp_path):
    config = StoreConfig(
        listen=f"unix://{tmp_path}/s.sock",
        pool_bytes=16 * MIB,
        redis_url=redis_server.url,
        fetch_window_bytes=MIB,
        redis_patience_s=20,
    )
    with closing(Store(config)) as store:
        for prefix in (PREFIX, OTHER):
            store.put(put_frames(prefix, prefix.spans(Kind.KV)), lambda: None)
        until(lambda: not store.stats().redis_pending_bytes)
        store.catalog.room.make(16 * MIB)
        yield store


def open_fetch(store: Store, prefix: Prefix = PREFIX, is_gone=lambda: False):
    wanted = pb.FetchRequest(
        namespace=prefix.namespace,
        leaf=prefix.chain.prefix_hash(TOKENS),
        ranges=[span_range(Kind.KV, 0, TOKENS)],
    )
    return store.fetch(wanted, lambda: None, is_gone=is_gone)


def first_rows(frames):
    """Takes frames up to the first with rows."""
    return next(frame for frame in frames if frame.record.kind is RecordKind.ROWS)


def loaded(store: Store) -> int:
    return store.tiers.redis_status()["loaded"]


def check(frame) -> int:
    """Holds rows to what was put; returns how many there are."""
    record, data = frame.record, b"".join(frame.parts)
    end = record.first_token + record.rows
    assert data == PREFIX.rows(Kind.KV, record.first_token, end, record.first_unit, record.units)
    return record.rows * record.units


def is_settled(store: Store) -> bool:
    """Whether nothing is pinned or promised."""
    return not store.tiers.pinned_bytes and not store._reader._budget._held_bytes


def test_two_windows_are_under_way_while_one_is_sent_and_no_more(store):
    windows, rows = 0, 0
    with closing(open_fetch(store)) as frames:
        rows += check(first_rows(frames))
        until(lambda: loaded(store) == 3 * WINDOW_BLOCKS)
        for frame in frames:
            windows += frame.record.kind is RecordKind.BARRIER
            assert loaded(store) <= (windows + 3) * WINDOW_BLOCKS
            rows += check(frame) if frame.record.kind is RecordKind.ROWS else 0
    assert rows == TOKENS * WIDE.units
    assert windows == BLOCKS // WINDOW_BLOCKS
    assert loaded(store) == BLOCKS, "each once"
    assert is_settled(store)


def test_a_reader_that_leaves_waits_for_nothing_and_leaves_nothing_pinned(store, redis_server):
    is_looked_at, asked, goes_on = threading.Event(), threading.Event(), threading.Event()

    def is_gone() -> bool:
        if is_looked_at.is_set():
            asked.set()
            goes_on.wait(20)
        return False

    frames = open_fetch(store, is_gone=is_gone)
    first_rows(frames)
    until(lambda: loaded(store) == 3 * WINDOW_BLOCKS)
    redis_server.pause()
    # The window before is over, so that the next load begins, and finds nobody who answers.
    next(frame for frame in frames if frame.record.kind is RecordKind.BARRIER)
    first_rows(frames)
    is_looked_at.set()
    assert asked.wait(20)
    frames.close()
    assert store.tiers._loader._waiters, "the load has not ended, so nobody can have waited for it"
    goes_on.set()
    until(lambda: is_settled(store))
    redis_server.resume()
    names = [PREFIX.name(Kind.KV, 256 * block) for block in range(10, 13)]
    until(lambda: all(store.tiers.resident(names)))  # asked for is asked for
    # Nothing lies in the pool that nobody knows of.
    until(lambda: not (store.catalog.room.make(16 * MIB), store.tiers.used_bytes)[1])
    assert sum(check(f) for f in open_fetch(store) if f.record.kind is RecordKind.ROWS)


def test_a_server_that_dies_meanwhile_ends_the_answer_as_late(store, redis_server):
    frames, rows = open_fetch(store), 0
    rows += check(first_rows(frames))
    redis_server.kill()
    for frame in frames:
        rows += check(frame) if frame.record.kind is RecordKind.ROWS else 0
        last = frame.record if frame.record.kind is RecordKind.MISSING else None
        if last is not None:
            assert last.code == pb.MISS_REASON_DEADLINE
    assert WINDOW_BLOCKS * 256 * WIDE.units <= rows < TOKENS * WIDE.units
    assert is_settled(store)


def test_what_found_no_room_ahead_comes_when_it_is_its_turn(store):
    """The pool has room for one window alone, so that the next fits when that one goes."""
    free = store.tiers.pool_bytes - store.tiers.used_bytes
    name = ObjectName(bytes(32), Kind.CHECKPOINT, bytes(32))
    (place,) = store.tiers.reserve([name], free - MIB)
    assert isinstance(place, Reserved)
    missing = [f for f in open_fetch(store) if f.record.kind is RecordKind.MISSING]
    store.tiers.abandon([place])
    assert not missing
    assert is_settled(store)


def test_pins_taken_ahead_end_with_a_wait_for_the_rest_that_fails(store, redis_server):
    """The pool has room for two of the next window's three objects."""
    free = store.tiers.pool_bytes - store.tiers.used_bytes
    name = ObjectName(bytes(32), Kind.CHECKPOINT, bytes(32))
    (place,) = store.tiers.reserve([name], free - MIB - MIB // 3)
    assert isinstance(place, Reserved)
    in_doubt = threading.Event()

    def is_gone() -> bool:
        if in_doubt.is_set():
            raise OSError("the reader's socket is closed")
        return False

    with closing(open_fetch(store, is_gone=is_gone)) as frames:
        first_rows(frames)
        until(lambda: loaded(store) == WINDOW_BLOCKS + 2)
        until(lambda: not store.tiers._loader._waiters)
        redis_server.pause()
        next(frame for frame in frames if frame.record.kind is RecordKind.BARRIER)
        in_doubt.set()
        with pytest.raises(OSError, match="socket"):
            next(frames)
    redis_server.resume()
    until(lambda: is_settled(store))
    store.tiers.abandon([place])


def test_streams_leave_half_of_the_leases_to_windows_that_are_sent(store):
    """Eight readers that stall could else keep three windows each."""
    streams = [open_fetch(store, prefix) for prefix in (PREFIX, OTHER) * 2]
    for frames in streams:
        first_rows(frames)
    budget = store._reader._budget
    assert budget._held_bytes <= budget._most_bytes // 2 + len(streams) * MIB
    for frames in streams:
        assert not [f for f in frames if f.record.kind is RecordKind.MISSING]
    assert is_settled(store)


def test_a_window_that_needs_the_share_of_one_ahead_of_it_gets_it(redis_server, tmp_path):
    """Small, large, small: the third is begun while the first is sent, and the second has no room.

    It waited for its own stream until it was late.
    """
    tokens = 256 * 16
    prefix = Prefix(bytes(32), range(tokens), GEOMETRY | {Kind.KV: WIDE})
    config = StoreConfig(
        listen=f"unix://{tmp_path}/t.sock",
        pool_bytes=16 * MIB,
        leased_share=0.25,
        redis_url=redis_server.url,
        fetch_window_bytes=4 * MIB,
        redis_patience_s=20,
    )
    with closing(Store(config)) as store:
        store.put(put_frames(prefix, prefix.spans(Kind.KV, Kind.HIDDEN)), lambda: None)
        until(lambda: not store.stats().redis_pending_bytes)
        store.catalog.room.make(16 * MIB)
        wanted = pb.FetchRequest(
            namespace=prefix.namespace,
            leaf=prefix.chain.prefix_hash(tokens),
            ranges=[span_range(Kind.HIDDEN, 0, 64), span_range(Kind.KV, 0, tokens)],
        )
        found = [frame.record for frame in store.fetch(wanted, lambda: None)]
        rows = sum(r.rows * r.units for r in found if r.number and r.kind is RecordKind.ROWS)
        assert rows == tokens * WIDE.units
        assert is_settled(store)
