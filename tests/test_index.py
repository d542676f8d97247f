"""The token index against a plain list of sequences."""

import time
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.prompt import Prompt
from tailreplay.store.record import Record
from tailreplay.store.views import Node, Path

SPACE = bytes(32)


def shared_tokens(a, b) -> int:
    """Longest common prefix, by looking."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def insert(index: TokenIndex, prefix: Prefix) -> Node:
    return index.insert(prefix.prompt)


def store(index: TokenIndex, prefix: Prefix, *kinds: Kind) -> None:
    """Lists a prefix's blocks, with the payload of some kinds in the CPU tier."""
    insert(index, prefix)
    for kind, first, end in prefix.spans(*kinds):
        if kind is Kind.CHECKPOINT:
            record = checkpoint(index, prefix, end)
        else:
            record = index.find(prefix.prompt, kind, end)
        assert (record.first_token, record.end_token) == (first, end)
        record.in_cpu = True


def checkpoint(index: TokenIndex, prefix: Prefix, end: int) -> Record:
    return index.checkpoint_of(prefix.prompt, end)


def restore(index: TokenIndex, prefix: Prefix, end: int) -> Node:
    """Lists blocks as their manifests describe them; returns the last, or the root."""
    source = TokenIndex()
    nodes = [source.insert(prefix.prompt, at) for at in (0, *range(256, end, 256), end)]
    blocks = [source.block(prefix.prompt, node) for node in nodes]
    return [index.foreign.restore(block) for block in blocks][-1]


def lose(index: TokenIndex, record: Record) -> None:
    record.in_cpu = record.in_redis = False
    index.trees.prune(record)


def match(index: TokenIndex, ids, namespace: bytes = SPACE):
    return index.match(Prefix(namespace, ids).prompt)


def branch(ids, at: int, tail) -> list[int]:
    return [*ids[:at], ids[at] + 1_000_000, *tail]


BASE = list(range(4000))
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


def test_siblings_share_the_hidden_pages_before_their_fork():
    index = TokenIndex()
    left, right = Prefix(SPACE, BASE[:256]), Prefix(SPACE, branch(BASE, 150, range(105)))
    pages = [insert(index, prefix).hidden for prefix in (left, right)]
    assert [a is b for a, b in zip(*pages, strict=True)] == [True, True, False, False]


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


def test_a_block_without_kv_of_its_own_does_not_hide_one_that_has_it():
    index = TokenIndex()
    empty, full = branch(BASE, 100, [1]), branch(BASE, 100, [2])
    store(index, Prefix(SPACE, empty), Kind.HIDDEN)
    store(index, Prefix(SPACE, full), Kind.KV)
    assert match(index, BASE[:100]).path[-1].has_kv


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


def wide_index(siblings: int) -> TokenIndex:
    """Siblings of one token each."""
    index = TokenIndex()
    for token in range(siblings):
        index.insert(Prompt(SPACE, np.array([token], np.uint64), bytes(16)))
    return index


def seconds_per_match(index: TokenIndex, request: Prompt) -> float:
    def once() -> float:
        start = time.perf_counter()
        for _ in range(50):
            index.match(request)
        return time.perf_counter() - start

    return min(once() for _ in range(5))


def test_a_match_among_100000_siblings_costs_little_more_than_among_100():
    request = Prefix(SPACE, BASE[:256]).prompt
    few, many = wide_index(100), wide_index(100_000)
    assert len(many) == 100_000
    assert seconds_per_match(many, request) < 20 * seconds_per_match(few, request)


def test_sizes_of_many_namespaces_take_one_pass():
    index = TokenIndex()
    spaces = [n.to_bytes(32, "little") for n in range(2000)]
    for space in spaces:
        store(index, Prefix(space, BASE[:257]), Kind.KV)
    started_s = time.perf_counter()
    sizes = index.trees.sizes()
    assert time.perf_counter() - started_s < 0.5, "with a pass for each it is a thousand times that"
    assert sizes == dict.fromkeys(spaces, (2, 257))


def covered(runs) -> set[int]:
    return {at for run in runs for at in range(run.first_token, run.end_token)}


def covered_by_list(blocks, ids, matched: int) -> set[int]:
    """Tokens of a match whose block has keys and values, its own or those of one that goes on."""
    ends = [min(first + 256, matched) for first in range(0, matched, 256)]
    return {
        at
        for end in ends
        for at in range((end - 1) // 256 * 256, end)
        if any(len(b) - 1 < (at // 256 + 1) * 256 and b[:end] == ids[:end] for b in blocks)
    }


TOKENS = (1, (1 << 32) - 1, (1 << 64) - 1)
"""A plain token, and two whose codes are long and contain each other's."""


class IndexAgainstList(RuleBasedStateMachine):
    """Sequences of few runs over three tokens, so that forks at every place are common."""

    lengths = st.lists(
        st.sampled_from([1, 2, 3, 63, 64, 65, 128, 191, 255, 256, 257]), min_size=1, max_size=3
    )
    ids = st.builds(
        lambda lengths, first: tuple(
            TOKENS[(first + run) % 3] for run, length in enumerate(lengths) for _ in range(length)
        ),
        lengths,
        st.integers(0, 2),
    )

    def __init__(self):
        super().__init__()
        self.index = TokenIndex()
        # What is stored, as the whole prefix up to the end of each block or state.
        self.blocks: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()

    @rule(ids=ids)
    def put_keys_and_values(self, ids):
        store(self.index, Prefix(SPACE, ids), Kind.KV)
        self.blocks |= {ids[:end] for _, _, end in Prefix(SPACE, ids).spans(Kind.KV)}

    @rule(ids=ids)
    def read_of_keys_and_values(self, ids):
        prefix = Prefix(SPACE, ids)
        assert restore(self.index, prefix, len(ids))
        for _, _, end in prefix.spans(Kind.KV):
            self.index.record(prefix.name(Kind.KV, end)).in_redis = True
            self.blocks.add(ids[:end])

    @rule(ids=ids)
    def put_a_state(self, ids):
        checkpoint(self.index, Prefix(SPACE, ids), len(ids)).in_cpu = True
        self.states.add(ids)

    @rule(ids=ids)
    def read_of_a_state(self, ids):
        prefix, at = Prefix(SPACE, ids), (len(ids) - 1) // 256 * 256
        node, name = restore(self.index, prefix, at), prefix.name(Kind.CHECKPOINT, len(ids))
        record = self.index.foreign.checkpoint(node, name, len(ids), prefix.digests[-8:])
        record.in_redis = True
        self.states.add(ids)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def evict_a_block(self, data):
        ids = data.draw(st.sampled_from(sorted(self.blocks)))
        lose(self.index, self.index.record(Prefix(SPACE, ids).name(Kind.KV, len(ids))))
        self.blocks.remove(ids)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def evict_a_state(self, data):
        ids = data.draw(st.sampled_from(sorted(self.states)))
        lose(self.index, self.index.record(Prefix(SPACE, ids).name(Kind.CHECKPOINT, len(ids))))
        self.states.remove(ids)

    @rule(ids=ids)
    def matches_what_the_lists_say(self, ids):
        found = match(self.index, ids)
        known = self.blocks | {s[: (len(s) - 1) // 256 * 256] for s in self.states}
        matched = max((shared_tokens(other, ids) for other in known), default=0)
        assert found.matched_tokens == matched
        assert [record.end_token for record in found.checkpoints] == sorted(
            len(s) for s in self.states if len(s) <= matched and ids[: len(s)] == s
        )
        assert covered(found.runs) == covered_by_list(self.blocks, ids, matched)
        for node in found.path:
            end = min(node.end_token, matched)
            assert node.has_kv == any(
                (len(b) - 1) // 256 * 256 == node.first_token and b[:end] == ids[:end]
                for b in self.blocks
                if len(b) >= end
            )

    @invariant()
    def nothing_else_is_listed(self):
        names = {Prefix(SPACE, b).name(Kind.KV, len(b)) for b in self.blocks}
        names |= {Prefix(SPACE, s).name(Kind.CHECKPOINT, len(s)) for s in self.states}
        assert {r.name for r in self.index.sweep.all() if r.exists} == names
        assert names or not (len(self.index) or self.index.trees.sizes())
        every = [r.name for r in self.index.sweep.all()]
        assert len(set(every)) == len(every) == len(self.index.trees.objects)
        assert names or not every


IndexAgainstList.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None
)
TestIndexAgainstList = IndexAgainstList.TestCase
