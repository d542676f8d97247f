"""Match over a real gRPC server: the longest stored prefix, and what exists along it."""

import grpc
import numpy as np
import pytest
from service_calls import BASE, HIDDEN, KV, code_of
from store_objects import Prefix, runs_of, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.tokens import to_wire


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


def test_malformed_tokens_are_refused(client, space):
    request = pb.MatchRequest(namespace=space, tokens=pb.Tokens(ids=b"abc"))
    code, details = code_of(lambda: client.stub.Match(request, timeout=20))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Tokens.ids has 3 bytes, wanted a multiple of 4" in details


def test_lookups_without_fetches_pin_nothing(server, client, prefix):
    client.put(prefix)
    for _ in range(1000):
        client.match(prefix)
    assert server.store.tiers.pinned_bytes == 0
    assert len(server.store.leases) == 0
