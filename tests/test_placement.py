"""Which server has what."""

from collections import Counter

import pytest
from store_objects import Prefix

from tailreplay.store.index import TokenIndex
from tailreplay.store.objects import Kind
from tailreplay.store.placement import SEGMENT_TOKENS, digest_of, owner, placing_token

PLACES = ["a:1/0", "b:1/0", "c:1/0"]
DIGESTS = [i.to_bytes(32, "big") for i in range(3000)]


def test_shares_are_even_and_the_order_of_servers_is_of_no_account():
    names = [PLACES[owner(PLACES, digest)] for digest in DIGESTS]
    assert min(Counter(names).values()) > 100
    turned = PLACES[::-1]
    assert [turned[owner(turned, digest)] for digest in DIGESTS] == names


def test_a_server_that_leaves_takes_only_its_own_along():
    for digest in DIGESTS:
        before = owner(PLACES, digest)
        if before < 2:
            assert owner(PLACES[:2], digest) == before


def test_placement_is_what_the_format_page_says():
    assert [owner(PLACES, bytes([i]) * 32) for i in range(8)] == [2, 1, 2, 0, 0, 0, 2, 2]
    assert owner(["alone:1/0"], bytes(32)) == 0
    segments = [digest_of(bytes(32), bytes([i]) * 32) for i in range(8)]
    assert [owner(PLACES, digest) for digest in segments] == [1, 1, 2, 2, 2, 1, 2, 2]


@pytest.mark.parametrize(
    ("kind", "end_token", "placed_by"),
    [
        (Kind.KV, 0, 0),  # the root, whose manifest has checkpoints
        (Kind.KV, 40, 40),
        (Kind.KV, 256, 64),
        (Kind.HIDDEN, 16384, 64),
        (Kind.HIDDEN, 16385, 16385),
        (Kind.KV, 16640, 16448),
        (Kind.CHECKPOINT, 40, 40),
        (Kind.CHECKPOINT, 256, 64),
        (Kind.CHECKPOINT, 16400, 64),  # with the block whose manifest speaks of it
        (Kind.CHECKPOINT, 16641, 16448),
        (Kind.CHECKPOINT, 32768, 16448),
    ],
)
def test_a_segment_is_called_by_its_first_page(kind, end_token, placed_by):
    assert placing_token(kind, end_token) == placed_by


def fork(base: list[int], at: int, length: int) -> list[int]:
    return [*base[:at], *range(7_000_000 + at, 7_000_000 + length)]


BASE = list(range(SEGMENT_TOKENS + 600))
SEQUENCES = [BASE, BASE[:40], BASE[:100], *(fork(BASE, at, at + 300) for at in (30, 70, 200, 300))]
SEQUENCES += [fork(BASE, SEGMENT_TOKENS + at, SEGMENT_TOKENS + 500) for at in (-100, 0, 30, 70)]


def listed(index: TokenIndex, prefix: Prefix, restored: bool) -> None:
    """Lists a prefix, as it is stored here or as its manifests describe it."""
    prompt, ends = prefix.prompt, [*range(256, len(prefix), 256), len(prefix)]
    source = TokenIndex()
    for end in (0, *ends):
        node = (source if restored else index).insert(prompt, end)
        if restored:
            assert index.foreign.restore(source.block(prompt, node)) is not None


@pytest.mark.parametrize("restored", [False, True])
def test_the_index_says_of_every_object_where_its_prompt_says_it_is(restored):
    """However it came to know of it, and with siblings that share pages of blocks."""
    index = TokenIndex()
    prefixes = [Prefix(bytes(32), ids) for ids in SEQUENCES]
    for prefix in prefixes:
        listed(index, prefix, restored)
    for prefix in prefixes:
        path = index.paths.to(prefix.namespace, prefix.chain.prefix_hash(len(prefix)))
        assert len(path.kv) == -(-len(prefix) // 256)
        for record in (*path.kv, *path.hidden):
            at = placing_token(record.name.kind, record.end_token)
            assert record.name.placed_by == prefix.chain.prefix_hash(at)
        for end in {1, 64, 100, 256, 300, len(prefix) - 1, len(prefix)}:
            if end <= len(prefix):
                name = index.checkpoint_of(prefix.prompt, end).name
                at = placing_token(Kind.CHECKPOINT, end)
                assert name.placed_by == prefix.chain.prefix_hash(at)
                assert index.record(name).name.placed_by == name.placed_by
