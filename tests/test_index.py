"""The token index finds by a prompt what is stored of it, and of nothing else."""

import time

import numpy as np
import pytest
from index_entries import BASE, SPACE, branch, checkpoint, lose, match, store
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.prompt import Prompt

BOUNDARIES = [1, 3, 63, 64, 65, 255, 256, 257, 511, 512, 1000, 3217, 3999]


@pytest.fixture(scope="module")
def one_sequence():
    index = TokenIndex()
    store(index, Prefix(SPACE, BASE), Kind.KV)
    return index


@pytest.mark.parametrize("m", BOUNDARIES)
def test_a_request_matches_exactly_the_tokens_it_shares(one_sequence, m):
    found = match(one_sequence, branch(BASE, m, range(300)))
    assert found.matched_tokens == m
    assert [node.first_token for node in found.path] == list(range(0, m, 256))


@pytest.mark.parametrize("m", [500, 580, 640, 1000])
@pytest.mark.parametrize("hiddens_from", [0, 576, 1000])
def test_keys_and_values_tell_the_tail_figures_of_pages_whose_hiddens_are_gone(m, hiddens_from):
    index, prefix = TokenIndex(), Prefix(SPACE, BASE[:1000])
    store(index, prefix, Kind.KV, Kind.HIDDEN)
    for kind, _, end in prefix.spans(Kind.HIDDEN):
        page = index.find(prefix.prompt, kind, end)
        page.tail_figures = end.to_bytes(6, "little")
        if end > hiddens_from:
            lose(index, page)
    kv = match(index, branch(BASE, m, range(9))).runs[0]
    assert (kv.kind, kv.end_token) == (Kind.KV, m)
    assert kv.tail_figures == min(-(-m // 64) * 64, 1000).to_bytes(6, "little")
    index.find(prefix.prompt, Kind.KV, 512).in_cpu = False
    early, *late = (r for r in match(index, BASE[:m]).runs if r.kind == Kind.KV)
    assert early.tail_figures == (256).to_bytes(6, "little")
    assert [r.tail_figures for r in late] == [kv.tail_figures][: m > 512]


@pytest.mark.parametrize("n", [*BOUNDARIES, 4000, 4100])
def test_a_shorter_or_longer_request_matches_all_that_is_common(one_sequence, n):
    assert match(one_sequence, range(n)).matched_tokens == min(n, 4000)


def test_nothing_matches_an_empty_request_or_another_namespace(one_sequence):
    assert match(one_sequence, []).matched_tokens == 0
    assert match(one_sequence, BASE, b"\1" * 32).matched_tokens == 0
    assert match(one_sequence, [9]).path == []


@pytest.mark.parametrize("fork", [1, 63, 64, 65, 100, 255, 256, 257, 300])
def test_siblings_that_fork_inside_a_block_are_told_apart(fork):
    index = TokenIndex()
    left, right = BASE[:600], branch(BASE, fork, range(300))
    for ids in (left, right):
        store(index, Prefix(SPACE, ids), Kind.KV, Kind.HIDDEN)
    for ids in (left, right):
        found = match(index, [*ids, 7])
        assert found.matched_tokens == len(ids)
        assert found.path[-1].kv.name == Prefix(SPACE, ids).name(Kind.KV, len(ids))
    assert match(index, branch(BASE, fork, [5])[:fork]).matched_tokens == fork


@pytest.mark.parametrize("end", [1, 64, 100, 255, 256, 257, 300, 512])
def test_a_checkpoint_is_found_by_every_sibling_that_shares_its_prefix(end):
    index = TokenIndex()
    writer = Prefix(SPACE, BASE[:600])
    store(index, writer, Kind.KV)
    checkpoint(index, writer, end).in_cpu = True
    sibling = branch(BASE, end, range(300))
    store(index, Prefix(SPACE, sibling), Kind.KV)
    assert [r.end_token for r in match(index, sibling).checkpoints] == [end]
    assert [r.end_token for r in match(index, BASE[:end]).checkpoints] == [end]
    early = branch(BASE, end - 1, range(300))
    assert match(index, early).checkpoints == ()


def test_checkpoints_come_in_order_and_only_those_that_exist():
    index = TokenIndex()
    prefix = Prefix(SPACE, BASE[:1000])
    store(index, prefix, Kind.KV)
    for end in (960, 3, 256, 700, 257):
        checkpoint(index, prefix, end).in_cpu = True
    checkpoint(index, prefix, 800)
    assert [r.end_token for r in match(index, BASE).checkpoints] == [3, 256, 257, 700, 960]
    lose(index, index.record(prefix.name(Kind.CHECKPOINT, 256)))
    assert [r.end_token for r in match(index, BASE).checkpoints] == [3, 257, 700, 960]
    assert index.record(prefix.name(Kind.CHECKPOINT, 256)) is None


def test_a_block_without_kv_of_its_own_does_not_hide_one_that_has_it():
    index = TokenIndex()
    empty, full = branch(BASE, 100, [1]), branch(BASE, 100, [2])
    store(index, Prefix(SPACE, empty), Kind.HIDDEN)
    store(index, Prefix(SPACE, full), Kind.KV)
    assert match(index, BASE[:100]).path[-1].has_kv


def test_a_prompt_is_told_what_the_index_knows_of_its_first_blocks():
    index = TokenIndex()
    writer, reader = Prefix(SPACE, BASE[:1000]), Prefix(SPACE, branch(BASE, 900, range(500)))
    store(index, writer, Kind.KV)
    first = writer.prompt
    index.block(first, index.insert(first, 768))  # as for its manifest, which needs digests
    asked = reader.prompt
    found = index.match(asked)
    index.tell(asked, found, 768)
    assert asked.digests_of(768, 1024) == reader.digests[8 * 768 : 8 * 1024]
    assert asked.state_at(768) == b"", "the digests before were not worked out"
    assert asked.chain.prefix_hash(1100) == reader.chain.prefix_hash(1100)


def wide_index(siblings: int) -> TokenIndex:
    """Siblings of one token each."""
    index = TokenIndex()
    for token in range(siblings):
        index.insert(Prompt(SPACE, np.array([token], np.uint64), bytes(16)))
    return index


def seconds_per_match(index: TokenIndex, request: Prompt) -> float:
    def once() -> float:
        start = time.thread_time()
        for _ in range(50):
            index.match(request)
        return time.thread_time() - start

    return min(once() for _ in range(5))


def test_a_match_among_20000_siblings_costs_little_more_than_among_100():
    request = Prefix(SPACE, BASE[:256]).prompt
    few, many = wide_index(100), wide_index(20_000)
    assert len(many) == 20_000
    assert seconds_per_match(many, request) < 20 * seconds_per_match(few, request)
