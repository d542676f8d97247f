"""What the store knows is what is there."""

import numpy as np
import pytest
from catalog_objects import BASE, BLOCK_BYTES, CHECKPOINT, HIDDEN, KV, fetch, match, put, two
from store_objects import Prefix, put_frames, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.arrivals import Arrived
from tailreplay.store.catalog import Catalog
from tailreplay.store.core import Store
from tailreplay.store.errors import IntegrityError
from tailreplay.store.geometry import Dtype, kv_geometry
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind, ObjectName, Provenance
from tailreplay.store.prompt import Prompt


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


def test_a_reader_that_comes_late_brings_nothing_back_of_a_block_that_stays(store, space):
    prefix = Prefix(space, BASE[:256])
    put(store, prefix)
    page, *rest = store.catalog.select(lambda r: r.name.kind is HIDDEN)
    store.catalog.lost(page)
    store.tiers.delete([page.name])
    assert store.catalog.loaded([page, *rest]) == [page]
    assert page.is_listed
    assert not page.exists


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
