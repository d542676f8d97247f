"""Put over a real gRPC server: whole, right and once, or not at all."""

import threading
from collections.abc import Callable

import grpc
import pytest
from service_calls import BASE, CHECKPOINT, HIDDEN, KV, announced, begin, code_of
from store_objects import GEOMETRY, Prefix, put_frames, runs_of, span_range
from tier_objects import put_bytes
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.geometry import Dtype, hidden_geometry, kv_geometry
from tailreplay.store.header import parse_header
from tailreplay.store.objects import Kind


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


def test_an_object_that_lies_unlisted_in_the_pool_does_not_block_its_name(server, client, prefix):
    size = len(prefix.object(KV, 0, 256))
    put_bytes(server.store.tiers, prefix.name(KV, 256), b"\xee" * size)
    assert client.put(prefix, [(KV, 0, 256)]).stored == 1
    assert client.fetch(prefix, span_range(KV, 0, 256)).rows == {0: prefix.rows(KV, 0, 256)}


def test_stored_bytes_are_those_of_the_geometry(client, prefix):
    answer = client.put(prefix)
    payload = sum(GEOMETRY[kind].payload_bytes(1000) for kind in (KV, HIDDEN))
    headers = sum(parse_header(prefix.object(*span)).header_bytes for span in prefix.spans())
    assert answer.stored_bytes == payload + GEOMETRY[CHECKPOINT].payload_bytes(1) + headers
