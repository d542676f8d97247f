"""Two stores on one Redis: each sees what the other stored, at any token, without a scan."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
import redis
from pydantic import ValidationError
from redis_server import RedisServer, servers_at
from store_objects import Client, Prefix, running_digests, runs_of, span_range
from waiting import Clock, until

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.chain import common_tokens, digest_key
from tailreplay.store.config import StoreConfig
from tailreplay.store.manifest_form import children_key, manifest_key
from tailreplay.store.objects import Kind
from tailreplay.store.redis_endpoint import RedisEndpoint
from tailreplay.store.redis_servers import RedisServers
from tailreplay.store.shared_index import SharedIndex

pytestmark = pytest.mark.redis

MIB = 1 << 20
BASE = list(range(1000))
KV, HIDDEN, CHECKPOINT = Kind


@pytest.fixture(scope="module")
def server():
    with closing(RedisServer()) as server:
        yield server


@pytest.fixture(scope="module")
def raw(server):
    with closing(redis.Redis.from_url(server.url)) as client:
        yield client


@pytest.fixture(scope="module")
def stores(server):
    settings = {"redis_url": server.url, "pool_bytes": 16 * MIB}
    with (
        serve_in_thread(**settings) as a,
        serve_in_thread(**settings) as b,
        closing(Client(a.address)) as to_a,
        closing(Client(b.address)) as to_b,
    ):
        yield (a.store, to_a), (b.store, to_b)


@pytest.fixture
def a(stores):
    return stores[0][1]


@pytest.fixture
def b(stores):
    return stores[1][1]


@pytest.fixture
def space():
    return os.urandom(32)


@pytest.fixture
def shared(server):
    with closing(SharedIndex(servers_at(server.url), "tailreplay:", 5.0)) as index:
        yield index


def put(client: Client, prefix: Prefix, *kinds: Kind) -> None:
    """Stores a prefix, and waits until its manifests are in Redis."""
    assert client.put(prefix, prefix.spans(*kinds)).dropped == 0
    until(lambda: client.stats().redis_pending_bytes == 0)


def branch(ids, at: int) -> list[int]:
    return [*ids[:at], ids[at] + 1_000_000, 7, 8, 9]


def key(prefix: Prefix, end: int) -> bytes:
    return manifest_key("tailreplay:", prefix.namespace, prefix.chain.prefix_hash(end))


@pytest.mark.parametrize("m", [1, 63, 255, 256, 257, 512, 777, 999])
def test_a_store_matches_at_any_token_what_another_stored(a, b, space, m):
    prefix = Prefix(space, BASE)
    put(a, prefix, KV, HIDDEN)
    other = Prefix(space, branch(BASE, m))
    found = b.match(other)
    assert found.matched_tokens == m
    assert {run.tier for run in found.runs} == {pb.TIER_REDIS}
    fetched = b.fetch(other, span_range(KV, 0, m), span_range(HIDDEN, 0, m), leaf=found.leaf)
    assert fetched.rows == {0: other.rows(KV, 0, m), 1: other.rows(HIDDEN, 0, m)}


def test_a_store_sees_within_a_second_what_it_asked_for_in_vain(a, b, space):
    took_s = []
    for first in (1, 2, 3):
        prefix = Prefix(space, [first, *BASE[1:]])
        assert b.match(prefix).matched_tokens == 0
        put(a, prefix)
        started_s = time.monotonic()
        until(lambda wanted=prefix: b.match(wanted).matched_tokens == 1000)
        took_s.append(time.monotonic() - started_s)
    assert sorted(took_s)[1] < 1
    found = b.match(prefix)
    assert runs_of(found, KV) == runs_of(found, HIDDEN) == [(0, 1000)]
    assert [c.token for c in found.checkpoints] == [1000]


def test_what_two_stores_have_of_one_conversation_adds_up(a, b, space):
    """The second turn is stored by another store than the first, and asked of the first again."""
    first, second = Prefix(space, BASE[:300]), Prefix(space, [*BASE[:300], *range(5000, 5600)])
    put(a, first, KV, HIDDEN)
    assert b.match(second).matched_tokens == 300
    put(b, second, KV, HIDDEN)
    found = a.match(Prefix(space, [*second.ids, 1]))
    for kind in (KV, HIDDEN):
        runs = runs_of(found, kind)
        assert [runs[0][0], runs[-1][1]] == [0, 900]
        assert [end for _, end in runs[:-1]] == [first for first, _ in runs[1:]]


def test_a_state_that_another_store_kept_inside_a_known_block_is_found(a, b, space):
    prefix = Prefix(space, BASE[:700])
    put(a, prefix, KV)
    put(b, prefix, CHECKPOINT)
    other = Prefix(space, [*BASE[:700], 5])
    assert [c.token for c in a.match(other).checkpoints] == [700]


def test_the_sibling_that_shares_most_is_found_among_many(a, b, space):
    """Neighbours in Redis' order of bytes, whatever digests come out."""
    for m in range(0, 250, 10):
        put(a, Prefix(space, branch(BASE, m)), KV)
    for m in (1, 9, 10, 11, 95, 129, 239, 245):
        wanted = Prefix(space, [*BASE[:m], 3_000_000])
        assert b.match(wanted).matched_tokens == min(m, 240)


def test_another_namespace_sees_nothing(a, b, space):
    put(a, Prefix(space, BASE), KV)
    assert b.match(Prefix(os.urandom(32), BASE)).matched_tokens == 0


@pytest.mark.slow
def test_what_a_killed_store_left_is_found(server, b, space, tmp_path):
    prefix, address = Prefix(space, BASE), f"unix://{tmp_path}/killed.sock"
    command = [sys.executable, "-P", "-m", "tailreplay.store.cli", "serve", "--listen", address]
    command += ["--redis-url", server.url, "--pool-bytes", str(4 * MIB)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
        try:
            with StoreClient(address, match_timeout_s=20) as reached:
                assert reached.connect(60)
            with closing(Client(address)) as writer:
                put(writer, prefix)
        finally:
            killed.kill()
    other = Prefix(space, branch(BASE, 777))
    assert b.match(other).matched_tokens == 777
    assert b.fetch(other, span_range(KV, 0, 777)).rows == {0: other.rows(KV, 0, 777)}


def test_a_member_without_its_manifest_is_a_counted_miss_and_goes(a, b, raw, shared, space):
    gone, kept = Prefix(space, BASE[:256]), Prefix(space, branch(BASE, 100))
    for prefix in (gone, kept):
        put(a, prefix, KV)
    raw.delete(key(gone, 256))
    children = children_key(key(gone, 0))
    assert raw.zcard(children) == 2
    wanted = Prefix(space, [*BASE[:200], 5])
    beyond = shared.beyond(wanted.prompt, 0, 0)
    assert beyond.last.block.prefix_hash == kept.chain.prefix_hash(len(kept))
    assert shared.figures()["stale_members"] == 1
    assert raw.zcard(children) == 1
    assert b.match(wanted).matched_tokens == 100


def test_a_member_whose_manifest_says_something_else_counts_for_nothing(a, raw, shared, space):
    prefix = Prefix(space, BASE[:256])
    put(a, prefix, KV)
    children = children_key(key(prefix, 0))
    (member,) = raw.zrange(children, 0, -1)
    longer = Prefix(space, branch(BASE, 100))
    forged = longer.digests[: 8 * 103] + member[-64:]  # another prefix's digests, this one's names
    raw.zadd(children, {forged: 0})
    beyond = shared.beyond(longer.prompt, 0, 0)
    assert common_tokens(beyond.last.block.digests, longer.digests) == 100
    assert raw.zrange(children, 0, -1) == [member]


def test_keys_and_values_that_were_lost_are_not_offered(stores, a, b, space):
    (store, _), _ = stores
    prefix = Prefix(space, BASE[:512])
    put(a, prefix, KV)
    store.catalog.lost(store.catalog.record(prefix.name(KV, 512)))
    assert runs_of(b.match(prefix), KV) == [(0, 256)]


def test_the_set_of_children_lives_as_long_as_the_manifests(a, raw, space):
    prefix = Prefix(space, BASE[:300])
    put(a, prefix, KV)
    for end in (0, 256):
        assert 0 < raw.pttl(children_key(key(prefix, end))) <= 23 * 3600 * 1000


def test_redis_holds_no_token_ids_of_children(a, raw, space):
    prefix = Prefix(space, BASE[:256])
    put(a, prefix, KV)
    (member,) = raw.zrange(children_key(key(prefix, 0)), 0, -1)
    assert member == prefix.digests + prefix.chain.prefix_hash(64) + prefix.chain.prefix_hash(256)


def test_a_question_is_asked_again_only_after_a_while(server, raw, space):
    clock, prompt = Clock(), Prefix(space, BASE).prompt
    with closing(SharedIndex(servers_at(server.url), "tailreplay:", 5.0, clock)) as shared:
        for now_s, asked in ((0.0, 1), (0.29, 1), (0.31, 2), (0.4, 2)):
            clock.now_s = now_s
            assert shared.beyond(prompt, 0, 0) is None
            assert shared.figures()["shared_lookups"] == asked


def test_a_redis_that_fails_is_left_alone_for_a_second(space):
    clock, prefixes = Clock(), [Prefix(space, [i]).prompt for i in range(4)]
    with closing(SharedIndex(servers_at("unix:///nowhere/redis.sock"), "t:", 0.1, clock)) as shared:
        for prompt, now_s, failed in zip(prefixes, (0.0, 0.1, 0.9, 1.1), (1, 1, 1, 2), strict=True):
            clock.now_s = now_s
            assert shared.beyond(prompt, 0, 0) is None
            assert shared.figures() == {"shared_failures": failed}


def test_a_frozen_redis_costs_one_lookup_its_timeout_and_the_others_nothing(start_redis, space):
    server, clock = start_redis(), Clock()
    servers = RedisServers([RedisEndpoint.parse(server.url)], timeout_s=0.05)
    with closing(SharedIndex(servers, "t:", 0.05, clock)) as shared:
        server.pause()
        for number in range(4):
            assert shared.beyond(Prefix(space, [number]).prompt, 0, 0) is None
        server.resume()
        assert shared.figures() == {"shared_failures": 1}
        clock.now_s += 1.1
        until(lambda: answered(shared, clock, space))


def answered(shared: SharedIndex, clock: Clock, space: bytes) -> bool:
    """Whether a lookup gets through; each is a new question, a while later."""
    clock.now_s += 2
    shared.beyond(Prefix(space, [int(clock.now_s)]).prompt, 0, 0)
    return "shared_lookups" in shared.figures()


def test_a_lookup_of_a_long_prompt_asks_a_few_times(a, b, server, space):
    """Whole blocks come several at a time: round trips grow with the logarithm of the length."""
    prefix = Prefix(space, range(64 * 256))
    put(a, prefix, KV)
    servers = servers_at(server.url)
    with closing(SharedIndex(servers, "tailreplay:", 5.0)) as shared:
        trips = []
        (client,) = servers.clients
        execute = client.connection_pool.get_connection
        client.connection_pool.get_connection = lambda *names: trips.append(1) or execute(*names)
        beyond = shared.beyond(prefix.prompt, 0, 0)
    assert len(beyond.whole) == 64
    assert len(trips) <= 4
    assert b.match(prefix).matched_tokens == len(prefix)


def test_a_key_file_keys_the_digests_and_describe_says_so(server, raw, space, tmp_path):
    """Prefixes of whole blocks are found by name; inside blocks only stores of one key agree."""
    key_file = tmp_path / "digests.key"
    key_file.write_bytes(b"sixteen bytes are the least")
    prefix = Prefix(space, BASE)
    settings = {"redis_url": server.url, "pool_bytes": 4 * MIB}
    with (
        serve_in_thread(**settings, digest_key_file=key_file) as keyed,
        closing(Client(keyed.address)) as client,
    ):
        put(client, prefix, KV)
        assert keyed.store.describe().settings["effective_digests"] == "keyed"
        assert client.match(Prefix(space, branch(BASE, 777))).matched_tokens == 777
    (member,) = raw.zrange(children_key(key(prefix, 0)), 0, -1)
    secret = digest_key(space, key_file.read_bytes())
    assert member[:-64] == running_digests(secret, prefix.tokens[:256])
    with serve_in_thread(**settings) as unkeyed, closing(Client(unkeyed.address)) as client:
        assert unkeyed.store.describe().settings["effective_digests"].startswith("unkeyed")
        assert client.match(Prefix(space, branch(BASE, 777))).matched_tokens == 768


def test_what_was_written_under_another_key_is_found_again_once_a_prompt_offers_it(
    server, space, tmp_path
):
    """Else it counted as stored and was never found, for as long as its manifest lived."""
    key_file = tmp_path / "digests.key"
    key_file.write_bytes(b"sixteen bytes are the least")
    prefix = Prefix(space, BASE[:1000])
    settings = {"redis_url": server.url, "pool_bytes": 4 * MIB}
    with (
        serve_in_thread(**settings, digest_key_file=key_file) as keyed,
        closing(Client(keyed.address)) as client,
    ):
        put(client, prefix, *Kind)
    with serve_in_thread(**settings) as unkeyed, closing(Client(unkeyed.address)) as client:
        found = client.match(prefix)
        assert (found.matched_tokens, len(found.checkpoints)) == (768, 0)
        assert client.put(prefix).duplicates == len(prefix.spans())
        found = client.match(Prefix(space, [*prefix.ids, 5]))
        assert (found.matched_tokens, [c.token for c in found.checkpoints]) == (1000, [1000])


def test_a_key_file_that_is_short_or_absent_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"fifteen bytes !")
    for name, reason in (("short", "at least 16 bytes"), ("absent", "can not be read")):
        with pytest.raises(ValidationError, match=reason):
            StoreConfig(digest_key_file=tmp_path / name)


def test_stale_members_of_a_long_lived_set_are_taken_out_as_others_are_added(a, raw, space):
    """Nobody may ever look next to them: a set lives as long as something is added to it."""
    prefixes = [Prefix(space, [number]) for number in range(200)]
    children = children_key(key(prefixes[0], 0))
    for number, prefix in enumerate(prefixes):
        put(a, prefix, KV)
        if number < 40:
            raw.delete(key(prefix, 1))  # as if it had expired
    members = {p.digests + 2 * p.name(KV, 1).prefix_hash for p in prefixes[:40]}
    stale = members & set(raw.zrange(children, 0, -1))
    assert len(stale) < 30
    assert raw.zcard(children) == 160 + len(stale)


def test_lookups_scan_nothing(a, b, raw, space):
    prefix = Prefix(space, BASE)
    put(a, prefix, KV)
    raw.config_resetstat()
    assert b.match(Prefix(space, branch(BASE, 777))).matched_tokens == 777
    used = {name.removeprefix("cmdstat_") for name in raw.info("commandstats")}
    assert not used & {"scan", "keys", "zscan", "hscan", "zrange", "smembers"}


def test_a_block_read_of_in_redis_is_kept_by_its_tokens_once_a_prompt_has_them_all(
    stores, a, b, space
):
    _, (store, _) = stores
    put(a, Prefix(space, BASE), KV)
    b.match(Prefix(space, branch(BASE, 999)))
    blocks = store.catalog._index.trees.blocks

    def foreign() -> int:
        rows = zip(blocks.keys, blocks.foreign, strict=True)
        return sum(1 for key, by_digests in rows if key and by_digests)

    before = foreign()
    assert b.match(Prefix(space, [*BASE, 5])).matched_tokens == 1000
    assert foreign() == before - 1
    assert b.match(Prefix(space, branch(BASE, 990))).matched_tokens == 990
