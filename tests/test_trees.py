"""Blocks and objects are shared, listed and pruned together."""

import time

import numpy as np
from index_entries import BASE, SPACE, branch, checkpoint, insert, lose, match, store
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.views import Path


def test_siblings_share_the_hidden_pages_before_their_fork():
    index = TokenIndex()
    left, right = Prefix(SPACE, BASE[:256]), Prefix(SPACE, branch(BASE, 150, range(105)))
    pages = [insert(index, prefix).hidden for prefix in (left, right)]
    assert [a is b for a, b in zip(*pages, strict=True)] == [True, True, False, False]


def test_a_partial_block_gives_way_to_the_sibling_that_goes_on_from_it():
    index = TokenIndex()
    shorter, longer = Prefix(SPACE, BASE[:300]), Prefix(SPACE, BASE[:400])
    for prefix in (shorter, longer):
        store(index, prefix, Kind.KV, Kind.HIDDEN)
    nodes = [insert(index, p) for p in (shorter, longer)]
    assert index.paths.extended_by(nodes[1].kv).kv == (nodes[0].kv,)
    assert index.paths.extended_by(nodes[0].kv).kv == ()
    lose(index, nodes[0].kv)
    found = match(index, BASE[:300])
    assert found.matched_tokens == 300
    assert found.path[-1] == nodes[1]
    assert found.path[-1].has_kv


def test_a_block_whose_pages_are_all_shared_goes_with_its_kv():
    index = TokenIndex()
    shorter, longer = Prefix(SPACE, BASE[:320]), Prefix(SPACE, BASE[:400])
    for prefix in (shorter, longer):
        store(index, prefix, Kind.KV, Kind.HIDDEN)
    lose(index, index.record(shorter.name(Kind.KV, 320)))
    assert index.paths.to(SPACE, shorter.name(Kind.KV, 320).prefix_hash) == Path()
    assert index.find(longer.prompt, Kind.HIDDEN, 320).exists


def test_the_longest_of_many_shorter_siblings_is_the_one_extended():
    index = TokenIndex()
    for n in (10, 200, 50, 120):
        store(index, Prefix(SPACE, BASE[:n]), Kind.KV)
        for other in range(3):  # extensions that lie between in sorted order
            insert(index, Prefix(SPACE, branch(BASE, n, range(other, 5))))
    node = insert(index, Prefix(SPACE, BASE[:190]))
    assert [r.rows for r in index.paths.extended_by(node.kv).kv] == [120]


def test_what_is_stored_on_blocks_leaves_out_what_is_only_named():
    index = TokenIndex()
    prefix = Prefix(SPACE, BASE[:600])
    store(index, prefix, Kind.KV)
    store(index, Prefix(SPACE, BASE[:128]), Kind.HIDDEN)
    rows = match(index, BASE[:600]).rows
    assert {r.in_cpu for r in index.paths.snapshot(rows).hidden} == {True, False}
    stored = index.paths.stored_on(rows)
    assert [r.end_token for r in stored.kv] == [256, 512, 600]
    assert [r.end_token for r in stored.hidden] == [64, 128]
    lose(index, stored.kv[1])
    assert [r.end_token for r in index.paths.stored_on(rows).kv] == [256, 600]
    assert index.paths.stored_on([]) == Path()


def test_rows_are_made_many_at_a_time_and_each_is_of_one_object():
    index = TokenIndex()
    prefix = Prefix(SPACE, np.arange(256 * 300))  # more than the rows that are made at a time
    store(index, prefix, Kind.KV, Kind.HIDDEN)
    assert (len(index), len(index.trees.objects)) == (300, 1500)
    spans = prefix.spans(Kind.KV, Kind.HIDDEN)
    assert {r.name for r in index.sweep.all()} == {prefix.name(kind, end) for kind, _, end in spans}
    for record in list(index.sweep.all()):
        lose(index, record)
    assert (len(index), len(index.trees.objects)) == (0, 0)
    other = Prefix(SPACE, np.arange(1, 256 * 300 + 1))
    store(index, other, Kind.KV)
    assert match(index, other.tokens).matched_tokens == len(other)
    assert match(index, prefix.tokens).matched_tokens == 0
    assert len(index.trees.objects) == 1500


def test_blocks_go_once_nothing_is_stored_in_them_or_behind_them():
    index = TokenIndex()
    prefix = Prefix(SPACE, BASE[:600])
    store(index, prefix, Kind.KV, Kind.HIDDEN, Kind.CHECKPOINT)
    early_first = sorted(index.sweep.all(), key=lambda r: r.end_token)
    for record in early_first[:-1]:
        lose(index, record)
        assert match(index, BASE).matched_tokens > 0
    lose(index, early_first[-1])
    assert (len(index), list(index.sweep.all())) == (0, [])
    assert match(index, BASE).matched_tokens == 0


def test_pruning_an_old_record_leaves_its_successor_alone():
    index = TokenIndex()
    prefix = Prefix(SPACE, BASE[:300])
    store(index, prefix, Kind.KV)
    old = checkpoint(index, prefix, 300)
    lose(index, old)
    new = checkpoint(index, prefix, 300)
    new.in_cpu = True
    lose(index, old)
    assert match(index, BASE[:300]).checkpoints == (new,)


def test_a_shared_page_stays_with_the_sibling_that_is_left():
    index = TokenIndex()
    left, right = Prefix(SPACE, BASE[:256]), Prefix(SPACE, branch(BASE, 150, range(105)))
    for prefix in (left, right):
        store(index, prefix, Kind.KV, Kind.HIDDEN)
    shared = index.find(right.prompt, Kind.HIDDEN, 64)
    nodes = [insert(index, prefix) for prefix in (left, right)]
    assert set(index.trees.homes(shared)) == set(nodes)
    for end in (192, 256):
        lose(index, index.find(left.prompt, Kind.HIDDEN, end))
    lose(index, index.record(left.name(Kind.KV, 256)))
    assert index.trees.homes(shared) == [insert(index, right)]
    lose(index, shared)
    assert match(index, right.ids).matched_tokens == 256


def test_sizes_of_many_namespaces_take_one_pass():
    index = TokenIndex()
    spaces = [n.to_bytes(32, "little") for n in range(2000)]
    for space in spaces:
        store(index, Prefix(space, BASE[:257]), Kind.KV)
    started_s = time.thread_time()
    sizes = index.trees.sizes()
    assert time.thread_time() - started_s < 0.5, "with a pass for each it is a thousand times that"
    assert sizes == dict.fromkeys(spaces, (2, 257))
