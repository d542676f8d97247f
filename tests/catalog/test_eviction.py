"""What goes first when the CPU tier is full, and what stays."""

from catalog_objects import BASE, BLOCK_BYTES, CHECKPOINT, HIDDEN, KV, MIB, fetch, match, put, two
from redis_server import servers_at
from store_objects import GEOMETRY, Prefix, put_frames, runs_of, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.core import Store
from tailreplay.store.header import object_bytes
from tailreplay.store.manifest import Manifests
from tailreplay.store.writer import Writer


def kv(store: Store, prefix: Prefix) -> list[tuple[int, int]]:
    return runs_of(match(store, prefix), KV)


def test_late_blocks_of_the_prefix_stored_first_go_first(store, space):
    old, new = two(space)
    put(store, old, KV)
    put(store, new, KV)
    assert store.catalog.room.make(2 * BLOCK_BYTES)
    assert (kv(store, old), kv(store, new)) == ([(0, 512)], [(0, 1024)])


def test_a_fetch_counts_as_a_use(store, space):
    old, new = two(space)
    put(store, old, KV)
    put(store, new, KV)
    fetch(store, old, span_range(KV, 700, 1024))  # the blocks before are of use with it alone
    assert store.catalog.room.make(4 * BLOCK_BYTES)
    assert (kv(store, old), kv(store, new)) == ([(0, 1024)], [])


def test_a_longer_put_keeps_the_blocks_it_goes_on_from(store, space):
    first_turn, other = two(space)
    put(store, first_turn, KV)
    put(store, other, KV)
    second_turn = Prefix(space, [*BASE, *range(5000, 5256)])
    store.put(put_frames(second_turn, [(KV, 1024, 1280)]), lambda: None)
    assert store.catalog.room.make(4 * BLOCK_BYTES)
    assert (kv(store, second_turn), kv(store, other)) == ([(0, 1280)], [])


def test_a_fetch_of_many_windows_leaves_late_blocks_the_first_to_go(store, space):
    long = Prefix(space, range(40 * 256))  # more than one window of 1 MiB
    put(store, long, KV)
    fetch(store, long, span_range(KV, 0, len(long)))
    assert store.catalog.room.make(BLOCK_BYTES)
    assert kv(store, long) == [(0, 39 * 256)]


def test_a_partial_block_goes_before_all_else_once_a_longer_one_covers_it(store, space):
    unrelated, _ = two(space)
    put(store, unrelated, KV)
    shorter, longer = Prefix(space, [9, *BASE[:299]]), Prefix(space, [9, *BASE[:399]])
    put(store, shorter, KV, HIDDEN)
    put(store, longer, KV, HIDDEN)
    assert store.catalog.room.make(1)
    assert store.catalog.room.make(1)
    assert runs_of(match(store, unrelated), KV) == [(0, 1024)]
    assert runs_of(match(store, longer), KV) == runs_of(match(store, longer), HIDDEN) == [(0, 400)]
    # The shorter sequence is served from the longer sibling's block, to the last token.
    found = match(store, shorter)
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, 300)]
    assert found.leaf == longer.chain.prefix_hash(400)


def test_what_is_pinned_stays_and_others_go_in_its_place(store, space):
    old, new = two(space)
    put(store, old, KV)
    put(store, new, KV)
    sizes = [(old.name(KV, end), BLOCK_BYTES) for end in (256, 512, 768, 1024)]
    pinned = store.tiers.pin(sizes, urgent=True, timeout_s=5)
    assert store.catalog.room.make(BLOCK_BYTES)
    assert (kv(store, old), kv(store, new)) == ([(0, 1024)], [(0, 768)])
    store.tiers.unpin(pinned)


def test_what_is_on_its_way_to_redis_stays_until_it_is_there_or_given_up(store, space):
    prefix, _ = two(space)
    manifests = Manifests(servers_at("unix:///nowhere/redis.sock"), "t:", 60.0)
    catalog = Catalog(manifests)
    catalog.attach(store.tiers)  # which has no Redis, so that nothing ever arrives there
    writer = Writer(catalog, store.tiers, digest_key=digest_key, max_object_bytes=MIB)
    frames = put_frames(prefix, prefix.spans(KV))
    assert writer.put(frames, lambda begin: begin.namespace).stored == 4
    assert catalog.figures()["redis_pending_bytes"] == 4 * BLOCK_BYTES
    assert not catalog.room.make(BLOCK_BYTES)
    catalog.redis.failed([prefix.name(KV, 256), prefix.name(KV, 512)])
    assert catalog.room.make(4 * BLOCK_BYTES)
    assert catalog.figures()["redis_pending_bytes"] == 2 * BLOCK_BYTES
    names = [prefix.name(KV, end) for end in (256, 512, 768, 1024)]
    assert store.tiers.resident(names) == [False, False, True, True]
    catalog.redis.failed(names)
    assert catalog.room.make(2 * BLOCK_BYTES)
    manifests.close()


def test_room_that_the_pool_does_not_have_is_not_made(store, space):
    prefix, _ = two(space)
    put(store, prefix)
    before = store.tiers.used_bytes
    assert not store.catalog.room.make(store.tiers.pool_bytes + 1)
    assert store.tiers.used_bytes == before


def test_an_empty_pool_has_nothing_to_evict(store):
    assert not store.catalog.room.make(1)


def longer(prefix: Prefix, more: int, seed: int = 0) -> Prefix:
    """The next turn of a conversation."""
    return Prefix(
        prefix.namespace, [*prefix.ids, *range(10_000 * (seed + 1), 10_000 * (seed + 1) + more)]
    )


def states(store: Store, prefix: Prefix) -> list[int]:
    return [point.token for point in match(store, prefix).checkpoints]


def state_of(prefix: Prefix, end: int) -> pb.Range:
    return pb.Range(
        kind=pb.KIND_CHECKPOINT,
        first_token=end - 1,
        end_token=end,
        prefix_hash=prefix.chain.prefix_hash(end),
    )


STATE_BYTES = object_bytes(GEOMETRY[CHECKPOINT], 1)


def test_a_state_that_a_later_turn_has_superseded_goes_before_all_else(store, space):
    other = Prefix(space, [7, *BASE])
    put(store, other, KV, CHECKPOINT)
    turn = Prefix(space, BASE)
    put(store, turn, KV, CHECKPOINT)
    fetch(store, turn, state_of(turn, 1024))  # the next turn starts from it, once
    second = longer(turn, 300)
    put(store, second, KV, CHECKPOINT)
    assert states(store, second) == [1024, 1324]
    assert store.catalog.room.make(STATE_BYTES)
    assert states(store, second) == [1324]
    assert kv(store, second) == [(0, 1324)]
    assert states(store, other) == [1025]


def test_a_state_that_several_start_from_stays(store, space):
    turn = Prefix(space, BASE)
    put(store, turn, KV, CHECKPOINT)
    old = Prefix(space, [7, *BASE])
    for seed in range(2):
        fetch(store, turn, state_of(turn, 1024))
        put(store, longer(turn, 300, seed), KV, CHECKPOINT)
    put(store, old, KV)
    store.catalog.room.make(STATE_BYTES)
    assert states(store, longer(turn, 300, 1)) == [1024, 1324]


def test_hiddens_far_before_the_end_go_first_where_there_is_a_state(store, space):
    prefix, other = Prefix(space, BASE), Prefix(space, [7, *BASE])
    put(store, other, KV)
    put(store, prefix, KV, HIDDEN, CHECKPOINT)
    assert store.catalog.room.make(12 * object_bytes(GEOMETRY[HIDDEN], 64))
    assert runs_of(match(store, prefix), HIDDEN) == [(768, 1024)]
    assert (kv(store, prefix), kv(store, other)) == ([(0, 1024)], [(0, 1025)])


def test_hiddens_that_were_fetched_or_are_all_there_is_are_as_good_as_any(store, space):
    fetched, alone = Prefix(space, BASE), Prefix(space, [7, *BASE[1:]])
    put(store, fetched, KV, HIDDEN, CHECKPOINT)
    fetch(store, fetched, span_range(HIDDEN, 0, 128))
    put(store, alone, KV, HIDDEN)
    put(store, longer(fetched, 10), KV, HIDDEN, CHECKPOINT)
    store.catalog.room.make(8 * object_bytes(GEOMETRY[HIDDEN], 64))
    assert runs_of(match(store, alone), HIDDEN) == [(0, 1024)]
    (first, end), *rest = runs_of(match(store, fetched), HIDDEN)
    assert (first, rest != []) == (0, True)
    assert end >= 128
