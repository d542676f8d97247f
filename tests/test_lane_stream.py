"""What a lane's reader makes of a store that stops in the middle of rows."""

import socket

import numpy as np
import pytest

from tailreplay.connector.breaker import Breaker
from tailreplay.connector.lane import Lanes
from tailreplay.connector.lane_socket import LaneSocket
from tailreplay.connector.lane_stream import LaneStream
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import IntegrityError, StoreUnavailable
from tailreplay.store.lane_wire import LaneRecord, RecordKind, hang_up

PAYLOAD = bytes(range(200))


@pytest.fixture
def store():
    """The store's end of a lane, what reads the other, and its breaker."""
    reader, writer = socket.socketpair()
    reader.settimeout(20)
    breaker = Breaker("streams", lambda: 0.0, max_failures=1)
    lanes = Lanes("unix:///nowhere", None)
    with writer:
        yield writer, LaneStream(lanes, LaneSocket(reader, None), breaker, print), breaker
    lanes.close()
    reader.close()


def record(number=0, crc=None):
    return LaneRecord(
        RecordKind.ROWS,
        number,
        units=2,
        rows=10,
        row_bytes=10,
        crc32c=crc32c(PAYLOAD) if crc is None else crc,
    ).pack()


def fill(step):
    rows = np.zeros((2, 10, 10), np.uint8)
    step.fill(rows)
    return rows.tobytes()


def read(stream, before=lambda: None):
    """All rows of a stream; something is done once a record has come."""
    came = []
    for step in stream:
        before()
        came.append(fill(step))
    return came


def test_records_read_with_rows_are_the_next(store):
    writer, stream, breaker = store
    one = record() + PAYLOAD
    writer.sendall(one * 3 + LaneRecord(RecordKind.DONE).pack())
    assert read(stream) == [PAYLOAD] * 3
    assert breaker.allows()


def test_a_record_that_came_in_part_is_read_on(store):
    writer, stream, _ = store
    following = record(1) + PAYLOAD + LaneRecord(RecordKind.DONE).pack()
    writer.sendall(record() + PAYLOAD + following[:33])
    steps = iter(stream)
    assert fill(next(steps)) == PAYLOAD
    writer.sendall(following[33:])
    assert [(step.record.number, fill(step)) for step in steps] == [(1, PAYLOAD)]


def test_rows_that_are_damaged_are_refused(store):
    writer, stream, breaker = store
    writer.sendall(record(crc=1) + PAYLOAD)
    with pytest.raises(IntegrityError, match="damaged"):
        read(stream)
    assert breaker.allows()


def test_a_store_that_rests_in_the_middle_of_rows_counts_as_failed(store):
    writer, stream, breaker = store
    writer.sendall(record() + PAYLOAD[:50])
    stream._lane.sock.settimeout(0.05)
    with pytest.raises(StoreUnavailable, match="broke"):
        read(stream)
    assert not breaker.allows()


def test_a_store_that_hangs_up_in_the_middle_of_rows_counts_as_failed(store):
    writer, stream, breaker = store
    writer.sendall(record() + PAYLOAD[:50])
    hang_up(writer)
    with pytest.raises(StoreUnavailable, match="closed"):
        read(stream)
    assert not breaker.allows()


def test_a_load_that_is_cancelled_in_the_middle_of_rows_is_no_failure(store):
    writer, stream, breaker = store
    writer.sendall(record() + PAYLOAD[:50])
    with pytest.raises(StoreUnavailable):
        read(stream, stream.cancel)
    assert breaker.allows()
