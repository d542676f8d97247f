"""What was read of in Redis is found by every prompt that goes through it."""

import pytest
from index_entries import BASE, SPACE, branch, checkpoint, insert, match, restore, store
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.record import Record


def test_a_state_read_of_in_redis_is_found_by_every_sibling():
    index = TokenIndex()
    writer = Prefix(SPACE, BASE[:700])
    store(index, Prefix(SPACE, BASE[:1000]), Kind.KV)
    node, name = restore(index, writer, 512), writer.name(Kind.CHECKPOINT, 700)
    index.foreign.checkpoint(node, name, 700, writer.digests[-8:]).in_redis = True
    for other in (branch(BASE, 700, [1]), branch(BASE, 900, [2])):
        assert [r.end_token for r in match(index, other).checkpoints] == [700]
    assert match(index, branch(BASE, 699, [3])).checkpoints == ()
    # One that puts the same state, or goes on from it, changes nothing.
    assert checkpoint(index, writer, 700) is index.record(name)
    assert [r.end_token for r in match(index, BASE[:700]).checkpoints] == [700]


@pytest.mark.parametrize("m", [1, 100, 255])
def test_a_block_read_of_in_redis_is_no_prompt_s_that_leaves_it(m):
    """It is kept by its tokens only once a prompt has them all."""
    index = TokenIndex()
    prefix = Prefix(SPACE, BASE[:256])
    restore(index, prefix, 256)
    index.record(prefix.name(Kind.KV, 256)).in_redis = True
    assert match(index, branch(BASE, m, range(300))).matched_tokens == m
    for n in (256, 200):
        assert match(index, BASE[:n]).matched_tokens == n
        assert match(index, branch(BASE, n - 1, range(300))).matched_tokens == n - 1


def test_a_prompt_has_the_pages_in_common_of_a_block_read_of_in_redis():
    index = TokenIndex()
    restore(index, Prefix(SPACE, BASE[:256]), 256)
    left = Prefix(SPACE, branch(BASE, 200, range(300)))
    insert(index, left)
    for end in (64, 128, 192):
        index.find(left.prompt, Kind.HIDDEN, end).in_redis = True
    assert [r.exists for r in insert_first_pages(index, left)] == [True, True, True, False]
    assert [r.exists for r in insert_first_pages(index, Prefix(SPACE, BASE[:256]))] == [
        True,
        True,
        True,
        False,
    ]


def test_a_block_read_of_in_redis_has_the_pages_of_one_that_was_put():
    """Else one object had two records, and each thought it was somewhere else."""
    index = TokenIndex()
    known = Prefix(SPACE, BASE[:256])
    store(index, known, Kind.KV, Kind.HIDDEN)
    node = restore(index, Prefix(SPACE, branch(BASE, 200, range(55))), 256)
    pages = zip(node.hidden, insert(index, known).hidden, strict=True)
    assert [a is b for a, b in pages] == [True, True, True, False]
    names = [record.name for record in index.sweep.all()]
    assert len(set(names)) == len(names)


def test_a_block_read_of_in_redis_finds_its_pages_among_many_siblings():
    """Of 16 siblings each was looked at, so that with more a page was listed and counted twice."""
    index = TokenIndex()
    known = Prefix(SPACE, BASE[1:257])
    short = [[*known.ids[:at], 1000] for at in (5, 70, 130)]
    others = [[256 * at, *known.ids[1:]] for at in range(1, 21)]  # before it in their order
    first = [branch(known.ids, 64, range(at, at + 100)) for at in range(300, 320)]
    for ids in (*short, *others, *first, known.ids):
        store(index, Prefix(SPACE, ids), Kind.KV, Kind.HIDDEN)
    node = restore(index, Prefix(SPACE, branch(known.ids, 200, range(55))), 256)
    pages = zip(node.hidden, insert(index, known).hidden, strict=True)
    assert [a is b for a, b in pages] == [True, True, True, False]
    names = [record.name for record in index.sweep.all()]
    assert len(set(names)) == len(names)


def insert_first_pages(index: TokenIndex, prefix: Prefix) -> list[Record]:
    """Hidden pages of a prefix's first block."""
    return index.insert(prefix.prompt, 256).hidden


def test_what_a_block_says_of_itself_puts_it_back():
    index, copy = TokenIndex(), TokenIndex()
    prefix = Prefix(SPACE, BASE[:600])
    insert(index, prefix)
    nodes = index.paths.nodes_to(SPACE, prefix.name(Kind.KV, 600).prefix_hash)
    blocks = [index.block(prefix.prompt, node) for node in nodes]
    assert copy.foreign.restore(blocks[1]) is None  # the block before it is not known
    assert all(copy.foreign.restore(block) is not None for block in blocks)
    assert match(copy, BASE).matched_tokens == 600
    assert {r.name for r in copy.sweep.all()} == {r.name for r in index.sweep.all()}
