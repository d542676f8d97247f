"""Fetch over a real gRPC server: the rows asked for, or word of what is missing."""

import itertools

import grpc
import pytest
from service_calls import BASE, CHECKPOINT, HIDDEN, KV, code_of
from store_objects import GEOMETRY, Prefix, runs_of, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.header import object_bytes


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
