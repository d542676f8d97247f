"""Manifests in a real Redis: what they say, and that a damaged one is a miss."""

import logging
from contextlib import closing

import pytest
import redis
from redis_server import RedisServer, servers_at
from store_objects import Prefix

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.index import TokenIndex
from tailreplay.store.manifest import Manifests
from tailreplay.store.manifest_form import Entry
from tailreplay.store.objects import Provenance
from tailreplay.store.views import Block

pytestmark = pytest.mark.redis

SPACE = bytes(range(32))
PREFIX = Prefix(SPACE, range(1, 301))
GOLDEN_BLOCK = "00000000 01 5560fac8403318bbd112292e19c5d14bc0337025afc6d498265e27f2516050da"
GOLDEN_SEALS = {"b": "9f472cae6f89c616", "k": "2b2acdfab5296549"}


def blocks_of(prefix: Prefix) -> list[Block]:
    index = TokenIndex()
    index.insert(prefix.prompt)
    path = index.paths.nodes_to(prefix.namespace, prefix.chain.prefix_hash(len(prefix)))
    root = index.insert(prefix.prompt, 0)
    return [index.block(prefix.prompt, node) for node in (root, *path)]


ROOT, FIRST, SECOND = blocks_of(PREFIX)
STATE = Entry(
    f"c100:{PREFIX.digests[792:800].hex()}",
    77,
    Provenance.APPROXIMATE,
    PREFIX.chain.prefix_hash(100),
    placed_by=PREFIX.chain.prefix_hash(64),
)
ENTRIES = [
    (SECOND, Entry("0", 500, Provenance.EXACT)),
    (FIRST, Entry("k", 1000, Provenance.EXACT)),
    (FIRST, Entry("3", 500, Provenance.APPROXIMATE)),
    (ROOT, STATE),
]


@pytest.fixture(scope="module")
def raw():
    with closing(RedisServer()) as server, closing(redis.Redis.from_url(server.url)) as client:
        yield client


@pytest.fixture
def manifests(raw):
    raw.flushall()
    kwargs = raw.connection_pool.connection_kwargs
    made = Manifests(servers_at(f"redis://127.0.0.1:{kwargs['port']}"), "t:", 60.0)
    yield made
    made.close()


def key_of(block: Block) -> bytes:
    return b"t:m:" + block.namespace + block.prefix_hash


def test_what_was_committed_is_loaded_in_order_of_blocks(manifests):
    manifests.commit(ENTRIES)
    loaded = manifests.load()
    assert [block for block, _ in loaded] == [
        Block(SPACE, ROOT.prefix_hash, bytes(32), 0, b"", ()),
        FIRST,
        SECOND,
    ]
    assert [sorted(e.field for e in entries) for _, entries in loaded] == [
        [STATE.field],
        ["3", "k"],
        ["0"],
    ]
    assert loaded[0][1] == [STATE]


def test_a_manifest_lives_shorter_than_a_day_and_holds_no_token_ids(manifests, raw):
    manifests.commit(ENTRIES)
    assert 0 < raw.pttl(key_of(FIRST)) <= 60_000
    stored = b"".join(raw.hgetall(key_of(FIRST)).values())
    assert b"".join(n.to_bytes(4, "little") for n in (1, 2, 3)) not in stored


def test_a_manifest_is_byte_for_byte_the_golden_one(manifests, raw):
    (_, block) = blocks_of(Prefix(SPACE, [1]))
    manifests.commit([(block, Entry("k", 1000, Provenance.EXACT))])
    fields = raw.hgetall(key_of(block))
    assert set(fields) == {b"b", b"k"}
    digests = Prefix(SPACE, [1]).digests
    head = bytes.fromhex(GOLDEN_BLOCK) + block.prefix_hash + digests
    assert fields[b"b"].hex() == head.hex() + GOLDEN_SEALS["b"]
    assert fields[b"k"].hex() == "e803000000000000" + "01" + GOLDEN_SEALS["k"]


def test_a_checkpoint_says_where_it_lies_only_within_the_first_block(manifests, raw):
    later = Entry(f"c300:{'1' * 16}", 78, Provenance.EXACT, PREFIX.chain.prefix_hash(300))
    manifests.commit([(ROOT, STATE), (FIRST, later)])
    stored = raw.hget(key_of(ROOT), STATE.field)
    assert stored[:-8].hex() == "4d00000000000000" + "02" + STATE.state_hash.hex() + (
        STATE.placed_by.hex()
    )
    assert raw.hget(key_of(FIRST), later.field)[:-8].hex() == (
        "4e00000000000000" + "01" + later.state_hash.hex()
    )


def test_a_block_with_keys_and_values_is_among_its_parents_children(manifests, raw):
    manifests.commit(ENTRIES)
    children = key_of(ROOT) + b"z"
    assert raw.zrange(children, 0, -1, withscores=True) == [
        (FIRST.digests + FIRST.page_hashes[0] + FIRST.prefix_hash, 0.0)
    ]
    assert 0 < raw.pttl(children) <= 60_000
    assert not raw.exists(key_of(FIRST) + b"z"), "of its child only a hidden page is there"


def test_what_was_forgotten_is_gone_and_the_rest_stays(manifests):
    manifests.commit(ENTRIES)
    manifests.forget(
        (block.called, field)
        for block, field in [(FIRST, "k"), (SECOND, "0"), (SECOND, "no such field")]
    )
    loaded = {block.prefix_hash: entries for block, entries in manifests.load()}
    assert [e.field for e in loaded[FIRST.prefix_hash]] == ["3"]
    assert loaded[SECOND.prefix_hash] == []


@pytest.mark.parametrize("field", [b"b", b"k"])
def test_every_flipped_bit_is_a_miss(manifests, raw, field):
    manifests.commit([(FIRST, Entry("k", 1000, Provenance.EXACT))])
    good = raw.hget(key_of(FIRST), field)
    for bit in range(0, 8 * len(good), 1 if field == b"k" else 101):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        raw.hset(key_of(FIRST), field, bytes(bad))
        assert [entries for _, entries in manifests.load()] in ([], [[]])


@pytest.mark.parametrize("length", [0, 1, 8, 16])
def test_a_truncated_value_is_a_miss(manifests, raw, length):
    manifests.commit([(FIRST, Entry("k", 1000, Provenance.EXACT))])
    raw.hset(key_of(FIRST), "k", raw.hget(key_of(FIRST), "k")[:length])
    assert [entries for _, entries in manifests.load()] == [[]]
    raw.hset(key_of(FIRST), "b", raw.hget(key_of(FIRST), "b")[:length])
    assert manifests.load() == []


def test_a_manifest_under_anothers_key_is_a_miss(manifests, raw):
    manifests.commit(ENTRIES)
    raw.rename(key_of(FIRST), b"t:m:" + SPACE + bytes(32))
    assert [block.prefix_hash for block, _ in manifests.load()] == [
        ROOT.prefix_hash,
        SECOND.prefix_hash,
    ]


def test_a_field_under_anothers_name_is_a_miss(manifests, raw):
    manifests.commit([(FIRST, Entry("k", 1000, Provenance.EXACT))])
    raw.hset(key_of(FIRST), "0", raw.hget(key_of(FIRST), "k"))
    ((_, entries),) = manifests.load()
    assert [entry.field for entry in entries] == ["k"]


@pytest.mark.parametrize("size", [0, (1 << 40) + 1, (1 << 64) - 1])
def test_a_sealed_size_that_no_object_has_is_a_miss(manifests, size):
    manifests.commit([(FIRST, Entry("k", size, Provenance.EXACT))])
    assert manifests.load() == []


@pytest.mark.parametrize("size", [0, 6, 96])
def test_a_page_keeps_its_tail_figures(manifests, size):
    entry = Entry("2", 500, Provenance.EXACT, tail_figures=bytes(range(size)))
    manifests.commit([(FIRST, entry)])
    assert manifests.load() == [(FIRST, [entry])]


@pytest.mark.parametrize("size", [1, 7, 102])
def test_a_sealed_page_with_figures_of_another_size_is_a_miss(manifests, size):
    entry = Entry("2", 500, Provenance.EXACT, tail_figures=bytes(size))
    manifests.commit([(FIRST, entry)])
    assert manifests.load() == []


@pytest.mark.parametrize("token", [0, (1 << 22) + 1, 1 << 32])
def test_a_sealed_checkpoint_of_no_prefix_is_a_miss(manifests, token):
    field, names = f"c{token}:{bytes(8).hex()}", bytes(32 if token > 256 else 64)
    manifests.commit([(FIRST, Entry(field, 1000, Provenance.EXACT, names))])
    assert manifests.load() == []


@pytest.mark.parametrize(("token", "size"), [(256, 32), (256, 96), (257, 31), (257, 64)])
def test_a_sealed_checkpoint_with_more_or_fewer_names_is_a_miss(manifests, token, size):
    field = f"c{token}:{bytes(8).hex()}"
    manifests.commit([(FIRST, Entry(field, 1000, Provenance.EXACT, bytes(size)))])
    assert manifests.load() == []


@pytest.mark.parametrize("field", ["x", "4", "c:", "cx:0", "c1:zz", ""])
def test_a_sealed_field_that_nobody_knows_is_a_miss(manifests, field):
    manifests.commit([(FIRST, Entry(field, 1000, Provenance.EXACT, bytes(32)))])
    assert manifests.load() == []


@pytest.mark.parametrize(
    "block",
    [
        Block(SPACE, b"\1" * 32, ROOT.prefix_hash, 0, FIRST.digests, FIRST.page_hashes[:3]),
        Block(SPACE, b"\1" * 32, ROOT.prefix_hash, 0, FIRST.digests[:-3], FIRST.page_hashes),
        Block(SPACE, b"\1" * 32, ROOT.prefix_hash, 0, FIRST.digests * 2, FIRST.page_hashes * 2),
        Block(SPACE, b"\1" * 31, ROOT.prefix_hash, 0, FIRST.digests, FIRST.page_hashes),
    ],
)
def test_a_sealed_block_whose_numbers_do_not_fit_is_a_miss(manifests, block):
    manifests.commit([(block, Entry("k", 1000, Provenance.EXACT))])
    assert manifests.load() == []


def test_keys_of_other_types_or_other_owners_are_passed_over(manifests, raw):
    raw.set(b"t:m:" + bytes(64), b"a string")
    raw.set("somebody else's", "value")
    raw.hset("t:o:payload", "b", "x")
    manifests.commit(ENTRIES)
    assert len(manifests.load()) == 3


def test_more_manifests_than_one_scan_gives_are_all_loaded(manifests):
    entry = Entry("k", 1000, Provenance.EXACT)
    blocks = [
        Block(SPACE, i.to_bytes(32, "big"), ROOT.prefix_hash, 0, FIRST.digests, FIRST.page_hashes)
        for i in range(2500)
    ]
    manifests.commit((block, entry) for block in blocks)
    assert {block.prefix_hash for block, _ in manifests.load()} == {b.prefix_hash for b in blocks}
    assert len(manifests.load(most=1500)) == 2000, "whole scans, and no more than needed"


def test_a_redis_that_is_not_there_is_unavailable_and_warned_of_once(caplog):
    absent = Manifests(servers_at("unix:///nowhere/redis.sock"), "t:", 60.0)
    for call in (absent.load, lambda: absent.forget([(FIRST.called, "k")])):
        with pytest.raises(StoreUnavailable, match="manifests"):
            call()
    assert absent.commit(ENTRIES) == [0] * len(ENTRIES)
    absent.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_redis_that_comes_back_is_told_of_once(start_redis, caplog):
    caplog.set_level(logging.INFO, "tailreplay.store.manifest")
    server = start_redis()
    with closing(Manifests(servers_at(server.url), "t:", 60.0)) as manifests:
        server.kill()
        with pytest.raises(StoreUnavailable):
            manifests.load()
        server.start()
        assert manifests.load() == manifests.load() == []
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_warning_of_what_redis_refused_repeats_no_hash(start_redis, caplog):
    server = start_redis(maxmemory="1")
    with closing(Manifests(servers_at(server.url), "t:", 60.0)) as manifests:
        manifests.commit(ENTRIES)
    (warning,) = caplog.messages
    assert "maxmemory" in warning
    assert "t:m:" not in warning
    assert repr(FIRST.prefix_hash)[2:-1] not in repr(warning)


def test_of_several_servers_one_that_is_away_takes_only_its_share(start_redis):
    first, second = start_redis(), start_redis()
    blocks = [Block(SPACE, bytes([i]) * 32, ROOT.prefix_hash, 0, b"", ()) for i in range(64)]
    entries = [(block, Entry("k", 1000, Provenance.EXACT)) for block in blocks]
    with closing(Manifests(servers_at(first.url, second.url), "t:", 60.0)) as manifests:
        assert all(manifests.commit(entries))
        assert len(manifests.load()) == 64
        assert manifests.whole
        second.kill()
        taken = manifests.commit(entries)
        assert 16 < sum(map(bool, taken)) < 48
        kept = {block.prefix_hash for block, _ in manifests.load()}
        assert kept == {b.prefix_hash for b, t in zip(blocks, taken, strict=True) if t}
        assert not manifests.whole
        with pytest.raises(StoreUnavailable):
            manifests.forget([(block.called, "k") for block in blocks])
        assert [entries for _, entries in manifests.load()] == [[]] * sum(map(bool, taken))
