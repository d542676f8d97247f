"""The client: deadlines hold, and a store that fails is left alone for a while.

Against real servers, and against addresses where there is none.
"""

import socket
import tempfile
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from store_objects import Prefix, put_frames, span_range

from tailreplay.connector.client import StoreClient, default_address
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import IntegrityError, InvalidRequest, LimitExceeded, StoreUnavailable
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind

NAMESPACE = bytes(range(32))
PREFIX = Prefix(NAMESPACE, range(1, 301))
SLACK_S = 5.0
"""For a machine on which others work too."""


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(prefix="tailreplay-") as folder:
        yield f"unix://{folder}/store.sock"


@pytest.fixture
def client(address, clock):
    settings = {"match_timeout_s": 20, "call_timeout_s": 20, "clock": clock}
    with StoreClient(address, lanes=False, **settings) as client:
        yield client


def fill(client):
    """Stores all of PREFIX through the client."""
    frames = list(put_frames(PREFIX))[1:]
    objects, chunks = [], []
    for frame in frames:
        if frame.WhichOneof("frame") == "object":
            chunks = []
            objects.append(ObjectBytes(frame.object, chunks))
        else:
            chunks.append(frame.chunk)
    return client.put(NAMESPACE, PREFIX.tokens, objects, timeout_s=20)


def fetch_all(client, leaf):
    wanted = span_range(Kind.KV, 0, 300)
    return list(client.fetch(NAMESPACE, leaf, [wanted], timeout_s=20))


def fail_once(client):
    with pytest.raises(StoreUnavailable) as failure:
        client.match(NAMESPACE, PREFIX.tokens, timeout_s=0.05)
    assert "not asked" not in str(failure.value)


@contextmanager
def mute_server():
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def not_asked(call):
    with pytest.raises(StoreUnavailable, match="not asked"):
        call()


def test_what_is_put_is_matched_and_fetched(client, address):
    with serve_in_thread(listen=address):
        stored = fill(client)
        assert (stored.stored, stored.duplicates, stored.dropped) == (8, 0, 0)
        assert fill(client).duplicates == 8
        answer = client.match(NAMESPACE, PREFIX.tokens)
        assert answer.matched_tokens == 300
        lease, rows, _, end = fetch_all(client, answer.leaf)
        kinds = (lease.record.kind, rows.record.kind, end.record.kind)
        assert kinds == (RecordKind.LEASE, RecordKind.ROWS, RecordKind.RANGE_END)
        target = np.empty((4, 256, 32), np.uint8)
        rows.fill(target)
        assert target.tobytes() == PREFIX.rows(Kind.KV, 0, 256)
        assert client.stats().served_bytes == len(PREFIX.rows(Kind.KV, 0, 300))
        assert client.describe().boot_id == answer.boot_id


def test_releasing_what_is_over_is_no_error(client, address):
    with serve_in_thread(listen=address):
        client.release(b"nobody's")


def test_a_client_is_made_without_a_store_and_says_that_there_is_none(client):
    assert not client.connect(0.05)
    with pytest.raises(StoreUnavailable, match="store at unix:"):
        client.match(NAMESPACE, PREFIX.tokens, timeout_s=0.05)


def test_a_client_finds_a_store_that_comes_later(client, address):
    assert not client.connect(0.05)
    with serve_in_thread(listen=address):
        assert client.connect(20)
        assert client.match(NAMESPACE, PREFIX.tokens).matched_tokens == 0


def test_an_absent_store_costs_less_than_the_deadline(address):
    with StoreClient(address) as client:
        started_s = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            client.match(NAMESPACE, PREFIX.tokens)
        assert time.perf_counter() - started_s < 0.25 + SLACK_S


def test_a_store_that_takes_calls_and_never_answers_costs_the_deadline():
    with mute_server() as mute, StoreClient(mute) as client:
        started_s = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            client.match(NAMESPACE, PREFIX.tokens)
        assert time.perf_counter() - started_s < 0.25 + SLACK_S


def test_a_store_that_takes_calls_and_never_answers_is_not_reached():
    with mute_server() as mute, StoreClient(mute) as client:
        assert not client.connect(0.05)


def client_threads():
    """All but the store's own, which come when there is more than one call."""
    return {t for t in threading.enumerate() if not t.name.startswith("store-")}


def test_connecting_leaves_nothing_that_closing_has_to_wait_for():
    with serve_in_thread() as server:
        before = client_threads()
        for _ in range(5):
            with StoreClient(server.address, lanes=False) as client:
                assert client.connect(20)
                assert client_threads() <= before


def test_a_lookup_can_have_a_deadline_of_its_own():
    with mute_server() as mute, StoreClient(mute, match_timeout_s=60) as client:
        started_s = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            client.match(NAMESPACE, PREFIX.tokens, timeout_s=0.05)
        assert time.perf_counter() - started_s < 0.05 + SLACK_S


def test_after_three_failures_an_absent_store_is_not_asked_until_the_period_is_over(client, clock):
    for _ in range(3):
        fail_once(client)
    not_asked(lambda: client.match(NAMESPACE, PREFIX.tokens))
    not_asked(client.stats)
    not_asked(lambda: fill(client))
    clock.now_s += 2.0
    fail_once(client)
    not_asked(lambda: client.match(NAMESPACE, PREFIX.tokens))


def test_the_breaker_closes_by_itself_when_the_store_is_back(client, clock, address):
    for _ in range(3):
        fail_once(client)
    with serve_in_thread(listen=address):
        assert client.connect(20)
        not_asked(client.stats)
        clock.now_s += 2.0
        client.stats()
        client.stats()


def test_a_refusal_is_not_a_failure_of_the_store(client, address):
    too_large = ObjectBytes(
        pb.PutObject(kind=pb.KIND_KV, first_token=0, end_token=256, size_bytes=1 << 40), ()
    )
    damaged = put_frames(PREFIX, [(Kind.KV, 0, 256)], make=lambda span: bytes(9000))
    _, announced, chunk = damaged
    wrong = ObjectBytes(announced.object, (chunk.chunk,))
    with serve_in_thread(listen=address):
        for _ in range(4):
            with pytest.raises(InvalidRequest, match="32"):
                client.match(bytes(31), PREFIX.tokens)
            with pytest.raises(LimitExceeded):
                client.put(NAMESPACE, PREFIX.tokens, [too_large], timeout_s=20)
            with pytest.raises(IntegrityError):
                client.put(NAMESPACE, PREFIX.tokens, [wrong], timeout_s=20)
        client.stats()
        with pytest.raises(InvalidRequest):
            list(client.fetch(NAMESPACE, b"", [span_range(Kind.KV, 5, 5)], timeout_s=20))


@pytest.mark.parametrize("lanes", [True, False])
def test_what_packing_raises_comes_out_and_does_not_count_against_the_store(address, lanes):
    announce = pb.PutObject(kind=pb.KIND_KV, end_token=256, size_bytes=8192)

    def fault():
        raise ZeroDivisionError("packing")

    with (
        serve_in_thread(listen=address),
        StoreClient(address, lanes=lanes, match_timeout_s=10) as client,
    ):
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                client.put(NAMESPACE, PREFIX.tokens, [ObjectBytes(announce, fault)], timeout_s=20)
        assert client.match(NAMESPACE, PREFIX.tokens).matched_tokens == 0


def test_streams_that_stall_are_left_alone_while_lookups_go_on(client, clock, address):
    gate = threading.Event()
    with serve_in_thread(listen=address, before_rows=lambda kind: gate.wait(20), stall_limit_s=60):
        fill(client)
        leaf = client.match(NAMESPACE, PREFIX.tokens).leaf
        for _ in range(3):
            wanted = [span_range(Kind.KV, 0, 300)]
            stream = client.fetch(NAMESPACE, leaf, wanted, timeout_s=20)
            assert next(iter(stream)).record.kind is RecordKind.LEASE
            stream.stalled()
            assert client.match(NAMESPACE, PREFIX.tokens).matched_tokens == 300
        not_asked(lambda: fetch_all(client, leaf))
        gate.set()
        not_asked(lambda: fetch_all(client, leaf))
        clock.now_s += 2.0
        assert fetch_all(client, leaf)[-1].record.kind is RecordKind.RANGE_END
        assert fetch_all(client, leaf)[-1].record.kind is RecordKind.RANGE_END


def test_ending_a_stream_early_is_no_failure_and_gives_its_pins_back(client, address):
    reached, gate = threading.Event(), threading.Event()

    def hold(kind):
        reached.set()
        gate.wait(20)

    with serve_in_thread(listen=address, before_rows=hold, stall_limit_s=60) as server:
        fill(client)
        leaf = client.match(NAMESPACE, PREFIX.tokens).leaf
        for _ in range(4):
            reached.clear()
            stream = client.fetch(NAMESPACE, leaf, [span_range(Kind.KV, 0, 300)], timeout_s=20)
            assert next(iter(stream)).record.kind is RecordKind.LEASE
            assert reached.wait(20)
            assert server.store.stats().pinned_bytes > 0
            stream.cancel()
        gate.set()
        assert fetch_all(client, leaf)[-1].record.kind is RecordKind.RANGE_END
    assert len(server.store.leases) == 0


def test_the_sidecar_is_asked_unless_the_environment_names_another_store(monkeypatch):
    monkeypatch.delenv("TAILREPLAY_LISTEN", raising=False)
    assert default_address().endswith("/tailreplay/store.sock")
    monkeypatch.setenv("TAILREPLAY_LISTEN", "127.0.0.1:9")
    assert default_address() == "127.0.0.1:9"
