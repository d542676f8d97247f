"""What is urgent passes what is not: the gate, and the streams that look at it."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from store_objects import Prefix, put_frames, span_range
from waiting import Clock

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind
from tailreplay.store.urgent_gate import UrgentGate


def test_bulk_waits_for_half_of_the_time_while_something_is_urgent(clock):
    gate = UrgentGate(hold_s=1, clock=clock)
    assert gate.hold_left_s() == 0
    left = []
    with gate.urgent():
        for _ in range(8):
            with gate.urgent():  # there is always a new one
                left.append(gate.hold_left_s())
            clock.now_s += 0.5
    assert left == [1, 0.5, 0, 0] * 2
    assert gate.hold_left_s() == 0
    gate.wait()


def test_one_that_goes_on_for_long_does_not_hold_bulk_up_again(clock):
    gate = UrgentGate(hold_s=1, clock=clock)
    with gate.urgent():
        left = []
        for _ in range(6):
            left.append(gate.hold_left_s())
            clock.now_s += 0.5
    assert left == [1, 0.5, 0, 0, 0, 0]


def test_the_end_of_what_is_urgent_opens_the_gate(clock):
    gate = UrgentGate(hold_s=3600, clock=clock)
    gate.enter()
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    gate.leave()
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.fixture
def store(tmp_path: Path, clock: Clock):
    """One whose clock stands still, so that a hold ends with the urgency alone."""
    config = StoreConfig(listen=f"unix://{tmp_path}/s.sock", pool_bytes=16 << 20)
    with closing(Store(config, clock=clock)) as store:
        yield store


def test_streams_of_hiddens_pass_streams_of_keys_and_values(store):
    prefix = Prefix(bytes(32), list(range(600)))
    store.put(put_frames(prefix), lambda: None)

    def rows(*ranges: pb.Range) -> int:
        request = pb.FetchRequest(
            namespace=prefix.namespace, leaf=prefix.chain.prefix_hash(600), ranges=ranges
        )
        frames = list(store.fetch(request, lambda: None))
        return sum(f.record.rows for f in frames if f.record.kind is RecordKind.ROWS)

    sent = []
    with store.tiers.gate.urgent():
        bulk = threading.Thread(target=lambda: sent.append(rows(span_range(Kind.KV, 0, 600))))
        bulk.start()
        assert rows(span_range(Kind.HIDDEN, 0, 600)) == 600
        assert not sent
    bulk.join(20)
    assert sent == [600]
