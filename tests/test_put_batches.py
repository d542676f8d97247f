"""Objects of one Put, stored some at a time: what is listed together, what an error leaves."""

from collections.abc import Callable

import pytest
from store_objects import Prefix

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import IntegrityError, StoreUnavailable
from tailreplay.store.objects import Kind
from tailreplay.store.shm_pool import ALIGN_BYTES
from tailreplay.store.tokens import to_wire

PREFIX = Prefix(bytes(range(32)), range(1, 256 * 8 + 1))
SPANS = PREFIX.spans(Kind.KV)
OBJECTS = [PREFIX.object(*span) for span in SPANS]


class Source:
    """Gives objects in order; `at` is told of each before it is given, and may raise."""

    def __init__(self, objects: list[bytes], at: Callable[[int], None] = lambda _: None) -> None:
        self.left, self.at, self.given = list(objects), at, 0

    def take(self, view: memoryview) -> None:
        self.at(self.given)
        self.given += 1
        view[:] = self.left.pop(0)

    def skip(self, size: int) -> None:
        assert len(self.left.pop(0)) == size


@pytest.fixture(scope="module")
def shared_store():
    with serve_in_thread(pool_bytes=64 << 20) as server:
        yield server.store


@pytest.fixture
def store(shared_store):
    """A store that is empty, and in whose pool nothing but what is listed takes room afterwards."""
    yield shared_store
    listed = shared_store.catalog.select(bool)
    rounded = [-(-record.size // ALIGN_BYTES) * ALIGN_BYTES for record in listed]
    assert shared_store.tiers.used_bytes == sum(rounded)
    shared_store.tiers.delete([record.name for record in listed])
    shared_store.catalog.lost(*listed)


def put(store, source: Source) -> pb.PutResponse:
    wanted = [
        pb.PutObject(kind=int(kind), first_token=first, end_token=end, size_bytes=len(data))
        for (kind, first, end), data in zip(SPANS, OBJECTS, strict=True)
    ]
    begin = pb.PutBegin(namespace=PREFIX.namespace, tokens=to_wire(PREFIX.tokens))
    with store.open_put(begin) as session:
        claimed = [session.claim(item) for item in wanted]
        assert all(claimed)
        session.store(wanted, source)
        return session.response


def stored_tokens(store) -> int:
    return store.catalog.match(PREFIX.prompt).matched_tokens


def test_objects_are_committed_together_and_listed_last(store, monkeypatch):
    committed, seen = [], []
    commit = store.tiers.commit
    monkeypatch.setattr(store.tiers, "commit", lambda p: (commit(p), committed.append(len(p))))
    answer = put(store, Source(OBJECTS, lambda _: seen.append(stored_tokens(store))))
    assert (answer.stored, committed) == (len(OBJECTS), [len(OBJECTS)])
    assert set(seen) == {0}
    assert stored_tokens(store) == len(PREFIX)


def test_no_more_is_held_than_a_part_of_the_pool(store, monkeypatch):
    committed = []
    commit = store.tiers.commit
    monkeypatch.setattr(store.tiers, "commit", lambda p: (commit(p), committed.append(p)))
    monkeypatch.setattr("tailreplay.store.put_session._BATCH_BYTES", 3 * len(OBJECTS[0]))
    assert put(store, Source(OBJECTS)).stored == len(OBJECTS)
    assert [len(places) for places in committed] == [3, 3, 2]


def test_a_damaged_object_takes_no_other_with_it_that_came_whole(store):
    damaged = [*OBJECTS[:3], OBJECTS[3][:-1] + bytes([OBJECTS[3][-1] ^ 1]), *OBJECTS[4:]]
    source = Source(damaged)
    with pytest.raises(IntegrityError, match="damaged"):
        put(store, source)
    assert (stored_tokens(store), source.left) == (3 * 256, [])
    assert put_rest(store) == len(OBJECTS) - 3


def test_a_stream_that_breaks_leaves_what_came_whole(store):
    def broken(number: int) -> None:
        if number == 5:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        put(store, Source(OBJECTS, broken))
    assert stored_tokens(store) == 5 * 256
    assert put_rest(store) == len(OBJECTS) - 5


def test_a_writer_that_is_gone_is_not_waited_for_again(store):
    def gone(number: int) -> None:
        raise StoreUnavailable(f"closed before object {number}")

    with pytest.raises(StoreUnavailable, match="before object 0"):
        put(store, Source(OBJECTS, gone))
    assert stored_tokens(store) == 0


def put_rest(store) -> int:
    """Stores what is missing; returns how many objects that is: nothing is claimed any more."""
    begin = pb.PutBegin(namespace=PREFIX.namespace, tokens=to_wire(PREFIX.tokens))
    with store.open_put(begin) as session:
        for (kind, first, end), data in zip(SPANS, OBJECTS, strict=True):
            item = pb.PutObject(
                kind=int(kind), first_token=first, end_token=end, size_bytes=len(data)
            )
            if session.claim(item):
                session.store([item], Source([data]))
        return session.response.stored
