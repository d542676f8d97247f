"""A stream that nobody closes ends, and never in a thread that holds a lock which its end needs."""

import gc
import threading
from contextlib import closing, contextmanager

import pytest
from store_objects import GEOMETRY, Prefix, put_frames, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.abandoned import Abandoned
from tailreplay.store.auth import Access
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind
from tailreplay.store.service import StoreService

PREFIX = Prefix(bytes(32), range(1000), GEOMETRY)
WANTED = pb.FetchRequest(
    namespace=PREFIX.namespace,
    leaf=PREFIX.chain.prefix_hash(1000),
    ranges=[span_range(Kind.KV, 0, 1000)],
)
LOCKS = {
    "the catalog's": lambda store: store.catalog._held.lock,
    "the leases'": lambda store: store.leases._lock,
    "the pins'": lambda store: store.tiers._pins._lock,
    "the budget's": lambda store: store._reader._budget._changed,
    "the pool's": lambda store: store.tiers._l1._lock,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    config = StoreConfig(listen=f"unix://{folder}/s.sock", pool_bytes=16 << 20)
    with closing(Store(config)) as store:
        store.put(put_frames(PREFIX), lambda: None)
        yield store


class Call:
    """What the service asks of a call that is there for as long as anybody looks."""

    def invocation_metadata(self):
        return ()

    def is_active(self):
        return True

    def cancel(self):
        """Nothing."""


@contextmanager
def no_collection():
    gc.collect()
    gc.freeze()  # a collection of what all tests have imported takes its time
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def let_fall(frames, has_rows) -> None:
    """Takes a stream's first rows, and leaves it behind as garbage that refers to itself."""
    while not has_rows(next(frames)):
        pass
    garbage = {"frames": frames}
    garbage["itself"] = garbage


def collect_under(lock) -> bool:
    """Whether a thread that holds a lock comes through a collection."""
    done = threading.Event()

    def collect() -> None:
        with lock:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    return done.wait(60)


def is_at_rest(store: Store) -> bool:
    return not (store.tiers.pinned_bytes or len(store.leases) or store._reader._budget._held_bytes)


@pytest.mark.parametrize("which", LOCKS)
def test_a_collection_under_a_lock_ends_no_stream_there(store, which):
    with no_collection():
        let_fall(
            store.fetch(WANTED, lambda: None), lambda frame: frame.record.kind is RecordKind.ROWS
        )
        assert store.tiers.pinned_bytes
        assert collect_under(LOCKS[which](store))
    until(lambda: is_at_rest(store))


def test_nor_one_of_a_call_that_grpc_lets_fall(store):
    service = StoreService(store, None, Access(None), max_streams=1)
    with no_collection():
        let_fall(service.Fetch(WANTED, Call()), lambda frame: frame.HasField("rows"))
        assert store.tiers.pinned_bytes
        assert service._streams.total() == 1
        assert collect_under(service._lock)
    until(lambda: is_at_rest(store))
    until(lambda: not service._streams.total())


def test_a_stream_that_ends_is_held_no_longer(store):
    def rows_of(frames) -> int:
        return sum(frame.record.kind is RecordKind.ROWS for frame in frames)

    assert rows_of(store.fetch(WANTED, lambda: None))
    with closing(store.fetch(WANTED, lambda: None)) as frames:
        next(frames)
    assert not store.streams._open
    assert is_at_rest(store)


def test_a_stream_that_fails_to_end_does_not_end_the_others(caplog):
    def failing():
        try:
            yield 1
        finally:
            raise OSError("the end")

    def ending(done: threading.Event):
        try:
            yield 1
        finally:
            done.set()

    streams, done = Abandoned(), threading.Event()
    for stream in (failing(), ending(done)):
        frames = streams.guard(stream)
        assert next(frames) == 1
        del frames
    assert done.wait(60)
    streams.close()
    assert "did not end as it should" in caplog.text
    assert not streams._open


def test_what_somebody_still_has_ends_before_its_memory_goes(tmp_path):
    config = StoreConfig(listen=f"unix://{tmp_path}/s.sock", pool_bytes=16 << 20)
    with closing(Store(config)) as store:
        store.put(put_frames(PREFIX), lambda: None)
        frames = store.fetch(WANTED, lambda: None)
        while next(frames).record.kind is not RecordKind.ROWS:
            pass
        assert store.tiers.pinned_bytes
    assert is_at_rest(store)
    assert next(frames, None) is None
