"""What the store gives up when it needs room, on LMCache's pool."""

import os

import numpy as np
import pytest
from redis_server import servers_at
from store_objects import GEOMETRY, Prefix, put_frames, runs_of, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.arrivals import Arrived
from tailreplay.store.catalog import Catalog
from tailreplay.store.chain import digest_key
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.errors import IntegrityError
from tailreplay.store.geometry import Dtype, kv_geometry
from tailreplay.store.header import object_bytes
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.manifest import Manifests
from tailreplay.store.objects import Kind, ObjectName, Provenance
from tailreplay.store.prompt import Prompt
from tailreplay.store.tokens import to_wire
from tailreplay.store.writer import Writer

MIB = 1 << 20
BASE = list(range(1024))
KV, HIDDEN, CHECKPOINT = Kind
BLOCK_BYTES = object_bytes(GEOMETRY[KV], 256)


class Steps:
    """A clock, and a gate before rows, that a test moves."""

    def __init__(self):
        self.now_s = 0.0
        self.before_rows = lambda kind: None


@pytest.fixture(scope="module")
def steps():
    return Steps()


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory, steps):
    listen = f"unix://{tmp_path_factory.mktemp('catalog')}/store.sock"
    config = StoreConfig(listen=listen, pool_bytes=8 * MIB, fetch_window_bytes=MIB)
    store = Store(
        config, clock=lambda: steps.now_s, before_rows=lambda kind: steps.before_rows(kind)
    )
    yield store
    store.close()


@pytest.fixture
def store(whole_store):
    """The module's store, empty."""
    whole_store.catalog.room.make(whole_store.tiers.pool_bytes)
    assert whole_store.tiers.used_bytes == 0
    return whole_store


@pytest.fixture
def space():
    return os.urandom(32)


def put(store: Store, prefix: Prefix, *kinds: Kind) -> None:
    answer = store.put(put_frames(prefix, prefix.spans(*kinds)), lambda: None)
    assert answer.dropped == 0


def match(store: Store, prefix: Prefix) -> pb.MatchResponse:
    return store.match(pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens)))


def fetch(store: Store, prefix: Prefix, *ranges: pb.Range) -> None:
    leaf = match(store, prefix).leaf
    request = pb.FetchRequest(namespace=prefix.namespace, leaf=leaf, ranges=ranges)
    assert not [
        f for f in store.fetch(request, lambda: None) if f.record.kind is RecordKind.MISSING
    ]


def kv(store: Store, prefix: Prefix) -> list[tuple[int, int]]:
    return runs_of(match(store, prefix), KV)


def two(space: bytes) -> tuple[Prefix, Prefix]:
    return Prefix(space, BASE), Prefix(space, [7, *BASE[1:]])


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


def test_what_was_evicted_is_no_longer_known(store, space):
    prefix, _ = two(space)
    put(store, prefix)
    assert store.catalog.room.make(store.tiers.pool_bytes)
    found = match(store, prefix)
    assert (found.matched_tokens, list(found.checkpoints)) == (0, [])
    assert store.catalog.figures()["blocks"] == 0
    assert store.catalog.tier_figures() == {}
    put(store, prefix)
    assert match(store, prefix).matched_tokens == 1024


def test_one_put_at_a_time_claims_a_name(store, space):
    prefix = Prefix(space, BASE)
    name = prefix.name(KV, 256)
    assert store.catalog.claim(prefix.prompt, name, 256, 1000)
    assert not store.catalog.claim(prefix.prompt, name, 256, 1000)
    store.catalog.unclaim(name)
    assert store.catalog.claim(prefix.prompt, name, 256, 1000)
    store.catalog.unclaim(name)


def test_a_reader_that_comes_late_does_not_bring_an_evicted_record_back(store, space):
    prefix = Prefix(space, BASE[:256])
    put(store, prefix)
    old = store.catalog.record(prefix.name(KV, 256))
    store.catalog.room.make(store.tiers.pool_bytes)
    put(store, prefix)
    store.catalog.loaded([old])
    store.catalog.used([old])
    assert not old.exists
    assert store.catalog.room.make(store.tiers.pool_bytes)
    assert store.catalog.tier_figures() == {}
    assert store.tiers.used_bytes == 0


def test_a_reader_is_not_at_fault_for_what_the_store_waits_for(store, space, steps, monkeypatch):
    prefix = Prefix(space, BASE)
    put(store, prefix, KV)
    expired, cancelled = [], []

    def wait(kind: Kind) -> None:
        steps.now_s += 1000
        expired.append(store.leases.expire())

    monkeypatch.setattr(steps, "before_rows", wait)
    request = pb.FetchRequest(
        namespace=space, leaf=match(store, prefix).leaf, ranges=[span_range(KV, 0, 1024)]
    )
    frames = store.fetch(request, lambda: cancelled.append(True))
    for frame in frames:
        if frame.record.kind is RecordKind.RANGE_END:
            break
    assert (expired, cancelled) == ([0, 0, 0, 0], [])
    steps.now_s += 1000  # the last frame lies there, and nobody takes it
    assert store.leases.expire() == 1
    assert cancelled == [True]
    assert list(frames) == []
    assert (store.tiers.pinned_bytes, len(store.leases)) == (0, 0)


def test_sums_of_the_tiers_agree_with_a_count_of_what_is_there(store, space):
    """They are kept as things move, since counting would hold lookups up."""
    prefixes = [Prefix(space, [i, *BASE]) for i in range(3)]
    for prefix in prefixes:
        put(store, prefix, KV, HIDDEN, CHECKPOINT)
    store.catalog.room.make(store.tiers.used_bytes // 2)
    gone = store.catalog.record(prefixes[2].name(KV, 256))
    store.catalog.lost(gone)
    store.tiers.delete([gone.name])
    counted = {}
    with store.catalog._lock:
        for record in store.catalog._index.sweep.all():
            if record.in_cpu:
                n, size = counted.get(("cpu", record.name.kind), (0, 0))
                counted["cpu", record.name.kind] = (n + 1, size + record.size)
        blocks = len(store.catalog._index)
    assert store.catalog.tier_figures() == counted
    assert store.catalog.namespaces()[space][0] == blocks


def provenances(store: Store, prefix: Prefix) -> list[tuple[int, int, int]]:
    return [(r.first_token, r.end_token, r.provenance) for r in match(store, prefix).runs]


def test_exact_replaces_approximate_and_never_the_other_way_round(store, space):
    prefix = Prefix(space, BASE[:512])
    span = [(KV, 0, 256)]
    rough = put_frames(prefix, span, provenance=Provenance.APPROXIMATE)
    assert store.put(rough, lambda: None).stored == 1
    assert provenances(store, prefix) == [(0, 256, Provenance.APPROXIMATE)]
    assert store.put(put_frames(prefix, span), lambda: None).stored == 1
    assert provenances(store, prefix) == [(0, 256, Provenance.EXACT)]
    again = store.put(put_frames(prefix, span, provenance=Provenance.APPROXIMATE), lambda: None)
    assert (again.stored, again.duplicates) == (0, 1)
    assert provenances(store, prefix) == [(0, 256, Provenance.EXACT)]
    assert store.catalog.tier_figures() == {("cpu", KV): (1, BLOCK_BYTES)}
    fetch(store, prefix, span_range(KV, 0, 256))


def test_a_replacement_that_is_damaged_leaves_nothing_wrong_behind(store, space):
    prefix = Prefix(space, BASE[:256])
    store.put(put_frames(prefix, [(KV, 0, 256)], provenance=Provenance.APPROXIMATE), lambda: None)
    damaged = put_frames(prefix, [(KV, 0, 256)], make=lambda span: bytes(BLOCK_BYTES))
    with pytest.raises(IntegrityError):
        store.put(damaged, lambda: None)
    request = pb.FetchRequest(
        namespace=space, leaf=prefix.chain.prefix_hash(256), ranges=[span_range(KV, 0, 256)]
    )
    missing = [f for f in store.fetch(request, lambda: None) if f.record.kind is RecordKind.MISSING]
    assert len(missing) == 1
    assert match(store, prefix).matched_tokens == 0


def prompt_of(number: int, tokens: int) -> Prompt:
    ids = np.arange(tokens, dtype=np.uint64)
    ids[0] = number
    return Prompt(bytes(32), ids, bytes(16))


def admit(catalog: Catalog, prompt: Prompt, kind: Kind, end: int) -> bool:
    name = ObjectName(prompt.namespace, kind, prompt.chain.prefix_hash(end))
    assert catalog.claim(prompt, name, end, 1000)
    return catalog.admit(prompt, [Arrived(name, end, 1000, Provenance.EXACT)])[0]


def test_states_far_into_prompts_that_nobody_stored_are_not_listed_without_end():
    """Each costs the index a block per 256 tokens before it, whatever its own size."""
    catalog, tokens = Catalog(None), 1 << 21
    lone = [prompt_of(number, tokens) for number in range(3)]
    assert [admit(catalog, prompt, CHECKPOINT, tokens) for prompt in lone] == [True, True, False]
    assert catalog.figures()["blocks"] == 2 * (tokens // 256 - 1)
    # One that hangs on stored blocks costs nothing, and is always welcome.
    known = prompt_of(9, 1000)
    assert all(admit(catalog, known, KV, end) for end in (256, 512, 768, 1000))
    assert admit(catalog, known, CHECKPOINT, 1000)


def test_shapes_of_a_namespace_go_with_its_last_object(store, space):
    prefix = Prefix(space, BASE)
    put(store, prefix)
    store.catalog.redis.forget_expired(0)
    assert set(store.catalog.namespaces()[space][2]) == set(Kind)
    store.catalog.room.make(store.tiers.pool_bytes)
    store.catalog.redis.forget_expired(0)
    assert space not in store.catalog.namespaces()
    other = Prefix(
        space, BASE, {KV: kv_geometry(fa_layers=1, kv_heads=1, head_dim=4, dtype=Dtype.FLOAT32)}
    )
    put(store, other, KV)


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
