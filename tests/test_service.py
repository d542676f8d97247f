"""The store over real gRPC, on LMCache's pool."""

import itertools
import os
import threading
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from store_objects import GEOMETRY, Client, Prefix, put_frames, runs_of, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.config import StoreConfig
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.geometry import Dtype, hidden_geometry, kv_geometry
from tailreplay.store.header import object_bytes, parse_header
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.server import SERVICE_NAME, StoreServer
from tailreplay.store.tokens import to_wire

MIB = 1 << 20
BASE = list(range(1000))
KV, HIDDEN, CHECKPOINT = Kind


@pytest.fixture(scope="module")
def server():
    with serve_in_thread(pool_bytes=32 * MIB) as running:
        yield running


@pytest.fixture(scope="module")
def shared_client(server):
    client = Client(server.address)
    yield client
    client.close()


@pytest.fixture
def client(server, shared_client):
    """A client of the module's server, which must be idle again after each test."""
    yield shared_client
    until(lambda: len(server.store.leases) == 0)
    assert server.store.tiers.pinned_bytes == 0


@pytest.fixture
def space():
    return os.urandom(32)


@pytest.fixture
def prefix(space):
    return Prefix(space, BASE)


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_stored_prefix_is_matched_with_all_it_has(client, prefix):
    answer = client.put(prefix)
    assert (answer.stored, answer.duplicates, answer.dropped) == (4 + 16 + 1, 0, 0)
    found = client.match(prefix)
    assert found.matched_tokens == 1000
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, 1000)]
    assert [(c.token, c.prefix_hash) for c in found.checkpoints] == [
        (1000, prefix.chain.prefix_hash(1000))
    ]
    assert {run.tier for run in found.runs} == {pb.TIER_CPU}
    assert {run.provenance for run in found.runs} == {pb.PROVENANCE_EXACT}


@pytest.mark.parametrize("m", [1, 3, 63, 64, 65, 255, 256, 257, 777, 999])
def test_any_token_can_be_the_boundary(client, prefix, m):
    client.put(prefix)
    other = Prefix(prefix.namespace, [*BASE[:m], 5_000_000, *range(300)])
    found = client.match(other)
    assert found.matched_tokens == m
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, m)]
    fetched = client.fetch(other, span_range(KV, 0, m), span_range(HIDDEN, 0, m))
    assert fetched.rows == {0: other.rows(KV, 0, m), 1: other.rows(HIDDEN, 0, m)}


def test_an_unknown_prefix_matches_nothing(client, prefix):
    found = client.match(prefix)
    assert (found.matched_tokens, found.leaf, list(found.runs)) == (0, b"", [])


def test_another_namespace_sees_nothing(client, prefix):
    client.put(prefix)
    other = Prefix(bytes(32), BASE)
    assert client.match(other).matched_tokens == 0
    leaf = client.match(prefix).leaf
    fetched = client.fetch(other, span_range(KV, 0, 256), leaf=leaf)
    assert (fetched.rows, set(fetched.missing)) == ({}, {0})


def figures_of(span: tuple[Kind, int, int]) -> bytes:
    """Tail figures of two replay groups that name the page."""
    return np.full(6, span[2], "<u2").tobytes() if span[0] is HIDDEN else b""


def test_runs_tell_what_is_missing_and_what_is_approximate(client, prefix):
    client.put(prefix, [(KV, 0, 256), (KV, 512, 768)])
    client.put(prefix, [(KV, 768, 1000)], provenance=Provenance.APPROXIMATE)
    client.put(prefix, prefix.spans(HIDDEN)[2:4])
    found = client.match(prefix)
    assert found.matched_tokens == 1000
    assert runs_of(found, KV) == [(0, 256), (512, 768), (768, 1000)]
    assert runs_of(found, HIDDEN) == [(128, 256)]
    assert [r.provenance for r in found.runs if r.kind == KV][-1] == pb.PROVENANCE_APPROXIMATE


@pytest.mark.parametrize("m", [1, 64, 65, 250, 1000])
def test_a_run_has_the_tail_figures_of_the_page_it_ends_in(client, prefix, m):
    client.put(prefix, figures=figures_of)
    found = client.match(Prefix(prefix.namespace, BASE[:m]))
    figures = {run.kind: run.tail_figures for run in found.runs}
    page = (m - 1) // 64 * 64
    assert figures == dict.fromkeys((KV, HIDDEN), figures_of((HIDDEN, page, min(page + 64, 1000))))


def test_media_at_a_position_end_the_match_there(client, space):
    with_media = Prefix(space, BASE[:300])
    client.put(with_media, with_media.spans(KV))
    tokens = to_wire(with_media.tokens)
    tokens.extended.add(position=200, value=(1 << 63) + 5)
    request = pb.MatchRequest(namespace=space, tokens=tokens)
    assert client.stub.Match(request, timeout=20).matched_tokens == 200


@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 2), (63, 65), (255, 257), (700, 999)])
def test_exactly_the_rows_asked_for_arrive(client, prefix, first, end):
    client.put(prefix)
    fetched = client.fetch(prefix, *(span_range(kind, first, end) for kind in (KV, HIDDEN)))
    assert fetched.rows == {0: prefix.rows(KV, first, end), 1: prefix.rows(HIDDEN, first, end)}
    assert fetched.ended == [0, 1]
    sent = [(f.range, f.first_token, f.first_token + f.rows) for f in fetched.frames]
    assert {span[0] for span in sent} == {0, 1}
    assert all(first <= a < b <= end for _, a, b in sent)
    sent_bytes = sum(len(f.data) for f in fetched.frames)
    assert sent_bytes == (end - first) * sum(GEOMETRY[k].payload_bytes(1) for k in (KV, HIDDEN))


@pytest.mark.parametrize(("first_unit", "units"), [(0, 1), (1, 2), (3, 1), (2, 0), (0, 4)])
def test_a_share_of_the_heads_can_be_fetched_alone(client, prefix, first_unit, units):
    client.put(prefix)
    wanted = span_range(KV, 250, 300, first_unit=first_unit, units=units)
    fetched = client.fetch(prefix, wanted)
    assert fetched.rows == {0: prefix.rows(KV, 250, 300, first_unit, units or None)}
    assert {(f.row_bytes, f.tier) for f in fetched.frames} == {(32, pb.TIER_CPU)}


def test_ranges_come_in_the_order_asked_for(client, prefix):
    client.put(prefix)
    ranges = [(HIDDEN, 900, 1000), (KV, 300, 1000), (HIDDEN, 0, 10), (KV, 0, 300)]
    fetched = client.fetch(prefix, *itertools.starmap(span_range, ranges))
    assert fetched.order == [0, 1, 2, 3]
    assert fetched.rows == {i: prefix.rows(*wanted) for i, wanted in enumerate(ranges)}


def test_a_checkpoint_stored_by_a_sibling_is_fetched_by_name(client, prefix):
    client.put(prefix)
    early = Prefix(prefix.namespace, BASE[:300])
    client.put(early, [(CHECKPOINT, 299, 300)])
    other = Prefix(prefix.namespace, [*BASE[:300], 5_000_000])
    (state,) = client.match(other).checkpoints
    wanted = span_range(CHECKPOINT, 299, 300, prefix_hash=state.prefix_hash)
    fetched = client.fetch(other, wanted)
    assert fetched.rows == {0: other.rows(CHECKPOINT, 299, 300)}
    assert state.size_bytes == object_bytes(GEOMETRY[CHECKPOINT], 1)


def test_rows_are_those_of_the_sibling_asked_for_not_of_its_twin(client, space):
    left, right = Prefix(space, BASE[:400]), Prefix(space, [*BASE[:300], *range(9000, 9100)])
    for sibling in (left, right):
        client.put(sibling)
    for sibling in (left, right):
        fetched = client.fetch(sibling, span_range(KV, 0, 400), span_range(HIDDEN, 0, 400))
        assert fetched.rows == {0: sibling.rows(KV, 0, 400), 1: sibling.rows(HIDDEN, 0, 400)}


def test_what_is_missing_is_said_and_the_rest_of_the_stream_goes_on(client, prefix):
    client.put(prefix, [*prefix.spans(KV)[:2], *prefix.spans(HIDDEN)])
    fetched = client.fetch(
        prefix, span_range(KV, 0, 1000), span_range(HIDDEN, 0, 1000), span_range(KV, 100, 400)
    )
    assert fetched.missing[0] == pb.Missing(
        range=0, first_token=512, end_token=768, reason=pb.MISS_REASON_EVICTED
    )
    assert fetched.rows[0] == prefix.rows(KV, 0, 512)
    assert fetched.rows[1] == prefix.rows(HIDDEN, 0, 1000)
    assert fetched.rows[2] == prefix.rows(KV, 100, 400)
    assert fetched.ended == [1, 2]


def test_rows_beyond_what_is_stored_are_missing(client, prefix):
    client.put(prefix)
    fetched = client.fetch(prefix, span_range(KV, 900, 1100))
    assert fetched.rows[0] == prefix.rows(KV, 900, 1000)
    assert (fetched.missing[0].first_token, fetched.missing[0].end_token) == (1000, 1100)


def test_an_object_damaged_in_the_pool_is_an_integrity_miss_and_goes(server, client, prefix):
    client.put(prefix)
    before = client.stats().integrity_errors
    size = object_bytes(GEOMETRY[KV], 256)
    (pinned,) = server.store.tiers.pin([(prefix.name(KV, 512), size)], urgent=True, timeout_s=5)
    with open(server.store.tiers.shm_path, "r+b") as pool:
        pool.seek(pinned.pool_offset + 60)
        pool.write(b"\0\0\0\0")
    server.store.tiers.unpin(pinned)
    fetched = client.fetch(prefix, span_range(KV, 0, 512), span_range(KV, 0, 256))
    assert fetched.missing[0].reason == pb.MISS_REASON_INTEGRITY
    assert fetched.rows == {0: prefix.rows(KV, 0, 256), 1: prefix.rows(KV, 0, 256)}
    assert client.stats().integrity_errors == before + 1
    assert runs_of(client.match(prefix), KV) == [(0, 256), (512, 1000)]
    assert client.put(prefix, prefix.spans(KV)).stored == 1
    assert client.fetch(prefix, span_range(KV, 0, 1000)).rows == {0: prefix.rows(KV, 0, 1000)}


BAD_RANGES = {
    "empty": (span_range(KV, 5, 5), "range 0 is of kind 1 [5, 5), wanted"),
    "backwards": (span_range(KV, 6, 5), "first_token < end_token"),
    "no kind": (pb.Range(end_token=1), "of kind 0"),
    "unknown kind": (pb.Range(kind=77, end_token=1), "of kind 77"),
    "units": (span_range(KV, 0, 5, first_unit=3, units=2), "units [3, 5) of 4"),
    "first unit": (span_range(KV, 0, 5, first_unit=4), "units [4, 4) of 4"),
    "state rows": (span_range(CHECKPOINT, 0, 1000), "the checkpoint [0, 1000)"),
}


@pytest.mark.parametrize("case", BAD_RANGES)
def test_a_bad_range_is_refused_with_what_was_wanted(client, prefix, case):
    client.put(prefix)
    wanted, message = BAD_RANGES[case]
    code, details = code_of(lambda: client.fetch(prefix, wanted))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


def test_a_checkpoint_asked_for_at_another_token_is_refused(client, prefix):
    client.put(prefix)
    wanted = span_range(CHECKPOINT, 3, 4, prefix_hash=prefix.chain.prefix_hash(1000))
    code, details = code_of(lambda: client.fetch(prefix, wanted))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "the one row before token 1000" in details


def test_a_second_put_is_counted_and_stores_nothing(client, prefix):
    first = client.put(prefix)
    used = client.stats().pool_used_bytes
    again = client.put(prefix)
    assert (again.stored, again.stored_bytes, again.duplicates) == (0, 0, first.stored)
    assert client.stats().pool_used_bytes == used


def test_two_puts_at_once_store_one_copy(client, prefix):
    half_way, go_on = threading.Event(), threading.Event()

    def slowly():
        for i, frame in enumerate(put_frames(prefix, prefix.spans(KV), chunk_bytes=1000)):
            yield frame
            if i == 3:  # in the middle of the first object
                half_way.set()
                assert go_on.wait(10)

    first = client.stub.Put.future(slowly(), timeout=20)
    assert half_way.wait(10)
    until(lambda: client.stats().pool_used_bytes)
    second = client.put(prefix, prefix.spans(KV))
    go_on.set()
    answers = [first.result(), second]
    assert sum(a.stored for a in answers) == 4
    assert sum(a.duplicates for a in answers) == 4
    assert client.fetch(prefix, span_range(KV, 0, 1000)).rows == {0: prefix.rows(KV, 0, 1000)}


def test_chunks_may_be_cut_anywhere(client, prefix):
    assert client.put(prefix, [(KV, 0, 256)], chunk_bytes=37).stored == 1
    assert client.fetch(prefix, span_range(KV, 0, 256)).rows == {0: prefix.rows(KV, 0, 256)}


@pytest.mark.parametrize("cut", [0, 100, 5000])
def test_a_put_that_breaks_off_leaves_nothing_of_the_unfinished_object(client, prefix, cut):
    used = client.stats().pool_used_bytes
    sent = threading.Event()

    def broken():
        yield from put_frames(prefix, [(HIDDEN, 0, 64)])
        data = prefix.object(KV, 0, 256)
        yield pb.PutFrame(
            object=pb.PutObject(kind=KV, first_token=0, end_token=256, size_bytes=len(data))
        )
        if cut:
            yield pb.PutFrame(chunk=data[:cut])
        sent.set()
        assert released.wait(20)

    released = threading.Event()
    call = client.stub.Put.future(broken(), timeout=20)
    assert sent.wait(10)
    until(lambda: client.stats().pool_used_bytes > used + 8192)
    call.cancel()
    released.set()
    until(lambda: client.stats().pool_used_bytes <= used + 8192)
    assert runs_of(client.match(prefix), KV) == []
    assert runs_of(client.match(prefix), HIDDEN) == [(0, 64)]
    assert client.put(prefix).duplicates == 1
    assert client.fetch(prefix, span_range(KV, 0, 1000)).rows == {0: prefix.rows(KV, 0, 1000)}


def swapped(prefix: Prefix) -> Callable[[tuple[Kind, int, int]], bytes]:
    return lambda span: Prefix(prefix.namespace, [7, *prefix.ids[1:]]).object(*span)


def flipped(prefix: Prefix, at: int) -> Callable[[tuple[Kind, int, int]], bytes]:
    def make(span: tuple[Kind, int, int]) -> bytes:
        data = bytearray(prefix.object(*span))
        data[at] ^= 4
        return bytes(data)

    return make


CORRUPTIONS = {
    "swapped": swapped,
    "flipped header": lambda prefix: flipped(prefix, 50),
    "flipped payload": lambda prefix: flipped(prefix, -1),
    "short": lambda prefix: lambda span: prefix.object(*span)[:-32],
    "long": lambda prefix: lambda span: prefix.object(*span) + bytes(32),
    "rubbish": lambda prefix: lambda span: b"\xaa" * 5000,
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corrupted_object_is_data_loss_and_never_visible(client, prefix, corruption):
    before = client.stats()
    make = CORRUPTIONS[corruption](prefix)
    code, _ = code_of(lambda: client.put(prefix, [(KV, 0, 256)], make=make))
    assert code is grpc.StatusCode.DATA_LOSS
    after = client.stats()
    assert after.integrity_errors == before.integrity_errors + 1
    assert after.pool_used_bytes == before.pool_used_bytes
    assert client.match(prefix).matched_tokens == 0
    assert client.put(prefix).dropped == 0
    assert client.fetch(prefix, span_range(KV, 0, 256)).rows == {0: prefix.rows(KV, 0, 256)}


def test_objects_before_a_corrupted_one_stay(client, prefix):
    make = lambda span: prefix.object(*span) if span[1] < 256 else b"\0" * 4000  # noqa: E731
    code, _ = code_of(lambda: client.put(prefix, prefix.spans(KV), make=make))
    assert code is grpc.StatusCode.DATA_LOSS
    assert runs_of(client.match(prefix), KV) == [(0, 256)]


def test_another_geometry_in_a_namespace_is_refused(client, prefix):
    client.put(prefix)
    wide = GEOMETRY | {
        KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=8, dtype=Dtype.FLOAT32),
        HIDDEN: hidden_geometry(sources=2, hidden_size=16, dtype=Dtype.BFLOAT16),
    }
    other = Prefix(prefix.namespace, [3, *BASE], wide)
    for kind in (KV, HIDDEN):
        code, details = code_of(lambda kind=kind: client.put(other, other.spans(kind)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"its namespace holds {GEOMETRY[kind]}" in details
    assert client.match(other).matched_tokens == 0


def begin(prefix: Prefix) -> pb.PutFrame:
    return next(put_frames(prefix))


def announced(
    kind: int, first: int, end: int, size: int = 9000, figures: bytes = b""
) -> pb.PutFrame:
    wanted = pb.PutObject(
        kind=kind, first_token=first, end_token=end, size_bytes=size, tail_figures=figures
    )
    return pb.PutFrame(object=wanted)


CHUNK = pb.PutFrame(chunk=b"x" * 9001)
BAD_PUTS = {
    "empty": ([], "wanted `begin`"),
    "no begin": ([announced(KV, 0, 256)], "wanted `begin`"),
    "chunk first": ([begin, CHUNK], "got `chunk`, wanted `object`"),
    "two begins": ([begin, begin], "got `begin`, wanted `object`"),
    "empty frame": ([begin, pb.PutFrame()], "got `None`, wanted `object`"),
    "no kind": ([begin, announced(0, 0, 256)], "kind 0, wanted one of"),
    "unknown kind": ([begin, announced(9, 0, 256)], "kind 9, wanted one of"),
    "off the grid": ([begin, announced(KV, 64, 320)], "[64, 320) of 1000 tokens"),
    "short block": ([begin, announced(KV, 0, 255)], "KV object covers [0, 255) of 1000"),
    "long page": ([begin, announced(HIDDEN, 0, 128)], "HIDDEN object covers [0, 128)"),
    "state of two": ([begin, announced(CHECKPOINT, 8, 10)], "CHECKPOINT object covers"),
    "backwards": ([begin, announced(KV, 256, 0)], "covers [256, 0), wanted a part of [0, 1000)"),
    "beyond the end": (
        [begin, announced(KV, 768, 1024)],
        "covers [768, 1024), wanted a part of [0, 1000)",
    ),
    "figures of half a group": (
        [begin, announced(HIDDEN, 0, 64, figures=b"123")],
        "3 bytes of tail figures, wanted a multiple of 6 up to 96",
    ),
    "figures of too many groups": (
        [begin, announced(HIDDEN, 0, 64, figures=bytes(102))],
        "102 bytes of tail figures",
    ),
    "figures of keys": (
        [begin, announced(KV, 0, 256, figures=bytes(6))],
        "6 bytes of tail figures, wanted a multiple of 6 up to 0",
    ),
    "no bytes": ([begin, announced(KV, 0, 256, 0)], "object has 0 bytes, wanted at least"),
    "too many bytes": ([begin, announced(KV, 0, 256), CHUNK], "9001 bytes, only 9000 are due"),
    "object in object": ([begin, announced(KV, 0, 256), announced(KV, 0, 256)], "9000 bytes"),
    "empty chunk": ([begin, announced(KV, 0, 256), pb.PutFrame(chunk=b"")], "9000 bytes"),
    "end in object": ([begin, announced(KV, 0, 256)], "stream ends or changes while 9000 bytes"),
}


@pytest.mark.parametrize("case", BAD_PUTS)
def test_a_malformed_put_is_refused_with_what_was_wanted(client, prefix, case):
    used = client.stats().pool_used_bytes
    frames, message = BAD_PUTS[case]
    made = [frame(prefix) if callable(frame) else frame for frame in frames]
    code, details = code_of(lambda: client.stub.Put(iter(made), timeout=20))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
    assert client.stats().pool_used_bytes == used
    assert client.put(prefix).stored == 21


def test_an_object_at_another_place_than_announced_is_refused(client, space):
    """Its name is right and its checksums too: a page of the very prefix, told to lie elsewhere."""
    prefix = Prefix(space, BASE[:64])

    def make(span):
        return prefix.object(KV, 0, 64)

    code, _ = code_of(lambda: client.put(prefix, [(HIDDEN, 0, 64)], make=make))
    assert code is grpc.StatusCode.DATA_LOSS


def test_an_object_above_the_limit_is_refused(client, prefix):
    frames = iter([begin(prefix), announced(KV, 0, 256, (512 << 20) + 1)])
    code, details = code_of(lambda: client.stub.Put(frames, timeout=20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "wanted at most 536870912" in details


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_namespace_of_another_size_is_refused_everywhere(client, size):
    odd = bytes(size)
    tokens = pb.Tokens(ids=bytes(4))
    calls = [
        lambda: client.stub.Match(pb.MatchRequest(namespace=odd, tokens=tokens), timeout=20),
        lambda: list(client.stub.Fetch(pb.FetchRequest(namespace=odd), timeout=20)),
        lambda: client.stub.Put(
            iter([pb.PutFrame(begin=pb.PutBegin(namespace=odd, tokens=tokens))]), timeout=20
        ),
    ]
    for call in calls:
        code, details = code_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"namespace has {size} bytes, wanted 32" in details


def test_malformed_tokens_are_refused(client, space):
    request = pb.MatchRequest(namespace=space, tokens=pb.Tokens(ids=b"abc"))
    code, details = code_of(lambda: client.stub.Match(request, timeout=20))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Tokens.ids has 3 bytes, wanted a multiple of 4" in details


def test_an_object_that_lies_unlisted_in_the_pool_does_not_block_its_name(server, client, prefix):
    name, data = prefix.name(KV, 256), prefix.object(KV, 0, 256)

    def fill(memory: memoryview) -> None:
        memory[:] = b"\xee" * len(data)

    server.store.tiers.put(name, len(data), fill)
    assert client.put(prefix, [(KV, 0, 256)]).stored == 1
    assert client.fetch(prefix, span_range(KV, 0, 256)).rows == {0: prefix.rows(KV, 0, 256)}


def test_lookups_without_fetches_pin_nothing(server, client, prefix):
    client.put(prefix)
    for _ in range(1000):
        client.match(prefix)
    assert server.store.tiers.pinned_bytes == 0
    assert len(server.store.leases) == 0


def test_releasing_a_lease_that_never_was_is_no_error(client):
    for lease_id in (b"", b"x" * 16):
        client.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=20)


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
def test_health_answers(client, name):
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=20)
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


def test_figures_add_up(client, prefix):
    before = client.stats()
    client.match(prefix)
    put = client.put(prefix)
    client.match(Prefix(prefix.namespace, [*BASE[:300], 5_000_000]))
    fetched = client.fetch(prefix, span_range(KV, 0, 1000))
    after = client.stats()
    for stats in (before, after):
        assert stats.lookups == stats.hits + stats.misses
        assert stats.queried_tokens == stats.matched_tokens + stats.unmatched_tokens
    # The fetch looked its leaf up.
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 1)
    assert after.queried_tokens - before.queried_tokens == 1000 + 301 + 1000
    assert after.matched_tokens - before.matched_tokens == 300 + 1000
    assert after.stored_bytes - before.stored_bytes == put.stored_bytes
    assert after.served_bytes - before.served_bytes == len(fetched.rows[0])
    listed = {(t.tier, t.kind): (t.objects, t.bytes) for t in after.tiers}
    sizes = {kind: listed[pb.TIER_CPU, kind] for kind in Kind}
    assert sum(size for _, size in sizes.values()) <= after.pool_used_bytes <= after.pool_bytes
    assert (after.redis_pending_bytes, after.redis_healthy) == (0, False)


def test_stored_bytes_are_those_of_the_geometry(client, prefix):
    answer = client.put(prefix)
    payload = sum(GEOMETRY[kind].payload_bytes(1000) for kind in (KV, HIDDEN))
    headers = sum(parse_header(prefix.object(*span)).header_bytes for span in prefix.spans())
    assert answer.stored_bytes == payload + GEOMETRY[CHECKPOINT].payload_bytes(1) + headers


def test_the_store_describes_itself(server, client, prefix):
    client.put(prefix)
    answer = client.stub.Describe(pb.DescribeRequest(), timeout=20)
    assert set(StoreConfig.model_fields) <= set(answer.settings)
    assert answer.settings["effective_pool_bytes"] == str(server.store.tiers.pool_bytes)
    assert answer.boot_id == client.match(prefix).boot_id
    (ours,) = [space for space in answer.namespaces if space.namespace == prefix.namespace]
    assert (ours.blocks, ours.tokens) == (4, 1000)
    assert (ours.kv_bytes_per_token, ours.hidden_bytes_per_token) == (4 * 32, 2 * 32)
    assert ours.checkpoint_bytes == 6 * 208


def test_a_small_pool_takes_several_times_its_size_and_keeps_what_was_used_last(space):
    with serve_in_thread(pool_bytes=4 * MIB) as small:
        client = Client(small.address)
        prefixes = [Prefix(space, [i, *BASE[1:]]) for i in range(80)]
        for prefix in prefixes:
            answer = client.put(prefix)
            assert (answer.stored, answer.dropped) == (21, 0)
            stats = client.stats()
            assert stats.pool_used_bytes <= stats.pool_bytes
        assert stats.stored_bytes > 2 * stats.pool_bytes
        assert stats.evicted_bytes > stats.pool_bytes
        kinds = (KV, HIDDEN)
        fetched = client.fetch(prefixes[-1], *(span_range(kind, 0, 1000) for kind in kinds))
        assert fetched.rows == {i: prefixes[-1].rows(kind, 0, 1000) for i, kind in enumerate(kinds)}
        # What is left of the oldest that is not quite gone is its beginning.
        for prefix in prefixes:
            runs = runs_of(client.match(prefix), KV)
            assert runs in ([], [(0, 256)], [(0, 512)], [(0, 768)], [(0, 1000)])
        # More than the pool can hold is dropped, and costs nobody their bytes.
        used = client.stats().pool_used_bytes
        size = 5 * MIB
        frames = [begin(Prefix(space, BASE)), announced(KV, 0, 256, size)]
        chunks = [pb.PutFrame(chunk=bytes(MIB))] * 5
        assert client.stub.Put(iter([*frames, *chunks]), timeout=20).dropped == 1
        assert client.stats().dropped_objects == 1
        assert client.stats().pool_used_bytes == used
        client.close()


def big_prefix(space: bytes) -> Prefix:
    """Rows of 8 KiB in one block of 2 MiB, far more than a connection buffers."""
    wide = {KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=256, dtype=Dtype.FLOAT32)}
    return Prefix(space, range(256 * 6), wide)


@pytest.fixture(scope="module")
def stern():
    """A server that cuts readers off early, and its client."""
    with serve_in_thread(pool_bytes=32 * MIB, stall_limit_s=0.3) as running:
        client = Client(running.address)
        yield running.store, client
        client.close()


def test_a_reader_that_stalls_is_cut_off_and_pins_nothing(stern, space):
    store, client = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    assert next(stream).lease.stall_limit_ms == 300
    next(stream)
    assert store.tiers.pinned_bytes > 0
    until(lambda: len(store.leases) == 0)
    until(lambda: store.tiers.pinned_bytes == 0)
    code, _ = code_of(lambda: list(stream))
    assert code is grpc.StatusCode.CANCELLED


def silent_put(client, prefix, gate):
    """A Put that announces an object and sends none of it until the gate opens."""

    def frames():
        yield pb.PutFrame(
            begin=pb.PutBegin(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
        )
        yield announced(KV, 0, 256)
        gate.wait(20)

    return client.stub.Put.future(frames(), timeout=20)


def test_a_writer_that_sends_nothing_is_cut_off_and_holds_nothing(space):
    gate = threading.Event()
    with serve_in_thread(put_stall_limit_s=0.2, pool_bytes=4 * MIB) as server:
        client = Client(server.address)
        prefix = Prefix(space, BASE)
        used = client.stats().pool_used_bytes
        code, _ = code_of(silent_put(client, prefix, gate).result)
        assert code is grpc.StatusCode.CANCELLED
        gate.set()
        until(lambda: server.store.tiers.used_bytes == used)
        assert client.put(prefix, prefix.spans(KV)).stored == 4
        client.close()


def test_lookups_are_answered_whatever_streams_do(space):
    gate = threading.Event()
    prefix = Prefix(space, BASE)
    with serve_in_thread(max_workers=4) as server:
        client = Client(server.address)

        def refused() -> str:
            try:
                client.put(prefix, [])
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            return ""

        held = [silent_put(client, Prefix(space, [i, *BASE]), gate) for i in range(3)]
        until(refused)
        assert refused().startswith("RESOURCE_EXHAUSTED: 3 streams are open, 3 of them")
        assert client.match(prefix).matched_tokens == 0
        gate.set()
        for put in held:
            assert code_of(put.result)[0] is grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: not refused())
        client.close()


def test_a_reader_that_leaves_pins_nothing(stern, space):
    store, client = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    next(stream)
    next(stream)
    stream.cancel()
    until(lambda: len(store.leases) == 0)
    until(lambda: store.tiers.pinned_bytes == 0)


def test_readers_together_pin_no_more_than_their_share(stern):
    store, client = stern
    prefixes = [big_prefix(os.urandom(32)) for _ in range(2)]
    for prefix in prefixes:
        client.put(prefix, prefix.spans(KV))
    streams = [
        client.open_fetch(prefix, span_range(KV, *part))
        for prefix in prefixes
        for part in ((0, 1024), (1024, 1536))  # windows of 8 and 4 MiB
    ]
    pinned = []
    for stream in streams:  # each takes its lease, and then no more
        next(stream)
    until(lambda: pinned.append(store.tiers.pinned_bytes) or not len(store.leases))
    assert 8 * MIB < max(pinned) <= store.tiers.pool_bytes * store.config.leased_share
    until(lambda: store.tiers.pinned_bytes == 0)
    for stream in streams:
        stream.cancel()


def test_an_early_release_ends_the_stream(stern, space):
    store, client = stern
    prefix = big_prefix(space)
    client.put(prefix, prefix.spans(KV))
    stream = client.open_fetch(prefix, span_range(KV, 0, len(prefix)))
    lease_id = next(stream).lease.lease_id
    client.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=20)
    assert "range_end" not in {frame.WhichOneof("frame") for frame in stream}
    until(lambda: store.tiers.pinned_bytes == 0)
    assert client.stats().leases == 0


def test_two_stores_on_any_port_do_not_exclude_each_other_and_files_are_left_alone(tmp_path):
    with (
        serve_in_thread(listen="127.0.0.1:0", pool_bytes=4 * MIB) as one,
        serve_in_thread(listen="127.0.0.1:0", pool_bytes=4 * MIB) as other,
    ):
        assert one.address != other.address
        for running in (one, other):
            client = Client(running.address)
            assert client.stats().pool_bytes == 4 * MIB
            client.close()
    precious = tmp_path / "precious"
    precious.write_text("text")
    with pytest.raises(StoreUnavailable, match="it is no socket"):
        StoreServer(StoreConfig(listen=f"unix://{precious}", pool_bytes=4 * MIB))
    assert precious.read_text() == "text"


def test_passwords_are_neither_described_nor_in_errors():
    with pytest.raises(ValueError, match="redis_url") as caught:
        StoreConfig(listen="127.0.0.1:0", redis_url="http://:secret@host")
    assert "secret" not in str(caught.value)
