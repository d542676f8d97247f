"""Redis is flushed, or comes back empty: what memory has is written there again, and only that."""

from contextlib import closing, contextmanager

import pytest
import redis
from redis_server import RedisServer
from store_objects import Prefix, put_frames, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.objects import Kind
from tailreplay.store.quota import Limits
from tailreplay.store.tokens import to_wire

pytestmark = pytest.mark.redis

MIB = 1 << 20
KV, HIDDEN, CHECKPOINT = Kind
LONG = 1000
WIDE = 1 << 40
"""An extended token of more than 32 bits."""

PROMPTS = [Prefix(bytes(32), [*range(300), *range(1000 * n, 1000 * n + 700)]) for n in range(1, 4)]
"""They part within a block."""

MEDIA = Prefix(b"\1" * 32, [*range(290), WIDE, WIDE + 1, *range(60)])


@contextmanager
def serving(folder, url: str, **settings):
    config = StoreConfig(
        listen=f"unix://{folder}/s.sock", pool_bytes=16 * MIB, redis_url=url, **settings
    )
    with closing(Store(config)) as store:
        yield store


def put(store: Store, *prefixes: Prefix) -> None:
    for prefix in prefixes:
        assert store.put(put_frames(prefix), lambda: None).dropped == 0
    until(lambda: not store.stats().redis_pending_bytes)


def match(store: Store, prefix: Prefix) -> pb.MatchResponse:
    wanted = pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
    return store.match(wanted)


def fetched(store: Store, prefix: Prefix) -> dict[int, bytes]:
    """All rows of a prefix, by kind."""
    end = len(prefix)
    ranges = [span_range(kind, 0, end) for kind in (KV, HIDDEN)]
    name = prefix.chain.prefix_hash(end)
    ranges.append(span_range(CHECKPOINT, end - 1, end, prefix_hash=name))
    wanted = pb.FetchRequest(
        namespace=prefix.namespace, leaf=match(store, prefix).leaf, ranges=ranges
    )
    units: dict[int, dict[tuple[int, int], bytes]] = {}
    for record, parts, *_ in store.fetch(wanted, lambda: None):
        if record.row_bytes:
            data = b"".join(parts)
            size = len(data) // record.units
            for i in range(record.units):
                at = (record.first_unit + i, record.first_token)
                units.setdefault(record.number, {})[at] = data[i * size : (i + 1) * size]
    return {n: b"".join(part for _, part in sorted(parts.items())) for n, parts in units.items()}


def whole(prefix: Prefix) -> dict[int, bytes]:
    end = len(prefix)
    return {
        0: prefix.rows(KV, 0, end),
        1: prefix.rows(HIDDEN, 0, end),
        2: prefix.rows(CHECKPOINT, end - 1, end),
    }


def keys(*servers: RedisServer) -> list[set[bytes]]:
    """What each server has of objects and manifests."""
    found = []
    for server in servers:
        with closing(redis.Redis.from_url(server.url)) as raw:
            some = raw.keys("tailreplay:*")
            found.append({k for k in some if k[11:13] in (b"o:", b"m:")})
    return found


def members(server: RedisServer) -> dict[bytes, object]:
    """Everything that manifests and sets of children say."""
    with closing(redis.Redis.from_url(server.url)) as raw:
        said = {}
        for key in raw.keys("tailreplay:m:*"):
            is_set = raw.type(key) == b"zset"
            said[key] = raw.zrange(key, 0, -1) if is_set else raw.hgetall(key)
        return said


def flush(server: RedisServer) -> None:
    with closing(redis.Redis.from_url(server.url)) as raw:
        raw.flushall()


def stored(store: Store) -> int:
    return store.tiers.redis_status()["stored"]


def test_after_a_flush_redis_says_and_has_what_it_did(tmp_path, redis_server):
    with serving(tmp_path, redis_server.url) as store:
        put(store, *PROMPTS, MEDIA)
        (had,), said = keys(redis_server), members(redis_server)
        in_redis = [t for t in store.stats().tiers if t.tier == pb.TIER_REDIS]
        flush(redis_server)
        until(lambda: keys(redis_server) == [had])
        until(lambda: members(redis_server) == said)
        assert [t for t in store.stats().tiers if t.tier == pb.TIER_REDIS] == in_redis
        assert store.tiers.pinned_bytes == 0
    with serving(tmp_path, redis_server.url) as again:
        for prefix in (*PROMPTS, MEDIA):
            assert match(again, prefix).matched_tokens == len(prefix)
            assert fetched(again, prefix) == whole(prefix)


def test_a_server_that_comes_back_empty_is_filled_and_one_that_was_away_asked_alone(
    tmp_path, redis_server
):
    with serving(tmp_path, redis_server.url) as store:
        put(store, *PROMPTS)
        (had,), before = keys(redis_server), stored(store)
        with closing(redis.Redis.from_url(redis_server.url)) as raw:
            raw.client_kill_filter(_type="normal", skipme=True)
            asked = store.tiers.redis_status()["lookups"]
            until(lambda: store.tiers.redis_status()["lookups"] >= asked + before)
            until(lambda: not store._upkeep._refill._lost)
        assert stored(store) == before
        redis_server.restart()
        until(lambda: keys(redis_server) == [had])
        assert stored(store) == 2 * before


def test_what_is_in_memory_no_more_is_promised_to_nobody(tmp_path, redis_server):
    with serving(tmp_path, redis_server.url) as store:
        put(store, MEDIA)
        store.catalog.room.make(16 * MIB)
        put(store, PROMPTS[1])
        flush(redis_server)
        until(lambda: not match(store, MEDIA).matched_tokens)
        assert fetched(store, PROMPTS[1]) == whole(PROMPTS[1])
        until(lambda: not store._upkeep._refill._lost)
        in_redis, in_cpu = (
            {t.kind: t.objects for t in store.stats().tiers if t.tier == tier}
            for tier in (pb.TIER_REDIS, pb.TIER_CPU)
        )
        assert in_redis == in_cpu


def test_of_two_servers_the_one_that_lost_everything_gets_its_own_alone(tmp_path):
    prompts = [Prefix(bytes([n]) * 32, range(600)) for n in range(12)]
    with closing(RedisServer()) as kept, closing(RedisServer()) as lost:
        with serving(tmp_path, f"{kept.url} {lost.url}") as store:
            put(store, *prompts)
            had, said = keys(kept, lost), members(lost)
            payloads = sum(key[11:13] == b"o:" for key in had[1])
            assert payloads
            assert all(had)
            before = stored(store)
            flush(lost)
            until(lambda: keys(kept, lost) == had)
            until(lambda: members(lost) == said)
            assert stored(store) == before + payloads
        with serving(tmp_path, f"{kept.url} {lost.url}") as again:
            assert fetched(again, prompts[0]) == whole(prompts[0])


def test_a_server_that_is_away_keeps_no_other_from_getting_what_it_lost(tmp_path):
    prompts = [Prefix(bytes([n]) * 32, range(600)) for n in range(12)]
    with (
        closing(RedisServer()) as away,
        closing(RedisServer()) as lost,
        serving(tmp_path, f"{away.url} {lost.url}") as store,
    ):
        put(store, *prompts)
        had = keys(away, lost)
        assert all(had)
        away.kill()
        flush(lost)
        payloads = {key for key in had[1] if key[11:13] == b"o:"}
        until(lambda: payloads <= keys(lost)[0], limit_s=10)
        assert payloads
        away.start()  # of what that has the other says something, too
        until(lambda: keys(away, lost) == had, limit_s=10)
        until(lambda: not store._upkeep._refill._lost)
        assert not store.stats().redis_pending_bytes


def test_a_server_that_evicts_by_itself_is_not_written_to_for_ever(tmp_path, redis_server, caplog):
    prompts = [Prefix(bytes([n]) * 32, range(2560)) for n in range(8)]
    with serving(tmp_path, redis_server.url) as store:
        put(store, *prompts)
        before = stored(store)
        with closing(redis.Redis.from_url(redis_server.url)) as raw:
            raw.config_set("maxmemory-policy", "allkeys-lru")
            raw.config_set("maxmemory", raw.info()["used_memory"] // 2)
            raw.flushall()
        until(lambda: "wanted noeviction" in caplog.text, limit_s=30)
        until(lambda: not store.stats().redis_pending_bytes)
        flush(redis_server)
        until(lambda: store._upkeep._refill._lost)
        assert stored(store) <= 6 * before
        assert not store.stats().redis_pending_bytes


def test_so_much_is_on_its_way_at_a_time_and_what_was_used_last_goes_first(
    tmp_path, redis_server, monkeypatch
):
    monkeypatch.setattr("tailreplay.store.refill._BATCH_BYTES", 100 << 10)
    with serving(tmp_path, redis_server.url) as store:
        put(store, *PROMPTS)
        (had,) = keys(redis_server)
        fetched(store, PROMPTS[1])
        batches, write_again = [], store.tiers.write_again

        def watched(wanted):
            batches.append([name for name, _ in wanted])
            assert sum(size for _, size in wanted) <= 100 << 10
            return write_again(wanted)

        store.tiers.write_again = watched
        flush(redis_server)
        until(lambda: keys(redis_server) == [had])
        assert len(batches) > 2
        own = {PROMPTS[1].name(kind, end) for kind, _, end in PROMPTS[1].spans()}
        assert set(batches[0]) <= own


def test_whose_namespaces_are_whose_is_said_again(tmp_path, redis_server):
    tenant = b"t" * 16
    prefix = Prefix(bytes(32), range(300), tenant=tenant)
    with serving(tmp_path, redis_server.url) as store:
        put(store, prefix)
        ledger = store.admin.operators._ledger
        until(lambda: ledger.namespaces_of(tenant) == {prefix.namespace})
        flush(redis_server)
        until(lambda: ledger.namespaces_of(tenant) == {prefix.namespace})


def test_limits_and_modes_are_written_again_and_what_is_decided_since_stays(tmp_path, redis_server):
    ours, theirs, changed = b"o" * 16, b"t" * 16, b"c" * 16
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(folders[0], redis_server.url) as one,
        serving(folders[1], redis_server.url) as two,
    ):
        first, second = one.admin.operators, two.admin.operators
        wanted = {ours: Limits(5000, None), theirs: Limits(None, 7000), changed: Limits(1, 1)}
        for tenant, limits in wanted.items():
            first.set_quota(
                pb.SetQuotaRequest(
                    tenant=tenant, cpu_bytes=limits.cpu_bytes, redis_bytes=limits.redis_bytes
                )
            )
        second.set_mode(pb.SetModeRequest(tenant=theirs, mode="tail"))
        quotas = [store.catalog.quotas for store in (one, two)]
        until(lambda: all(q.limited() == wanted and q.mode(theirs) == "tail" for q in quotas))
        until(lambda: first._epoch and second._epoch)
        flush(redis_server)
        wanted[changed] = Limits(2, None)
        second.set_quota(pb.SetQuotaRequest(tenant=changed, cpu_bytes=2))
        ledger = first._ledger
        until(lambda: ledger.limits() == wanted and ledger.modes() == {theirs: "tail"}, limit_s=5)
        until(lambda: all(q.limited() == wanted and q.mode(theirs) == "tail" for q in quotas))
        # It holds from then on, and what is taken away stays away.
        first.delete_quota(pb.DeleteQuotaRequest(tenant=theirs))
        del wanted[theirs]
        until(lambda: all(q.limited() == wanted for q in quotas))
        assert ledger.limits() == wanted


def test_a_key_file_is_used_for_what_is_told_again(tmp_path, redis_server):
    """Its digests are those by which other stores find a prefix at any token."""
    secret = tmp_path / "digest.key"
    secret.write_bytes(b"k" * 32)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(folders[0], redis_server.url, digest_key_file=secret) as one,
        serving(folders[1], redis_server.url, digest_key_file=secret) as two,
    ):
        put(one, PROMPTS[0])
        said = members(redis_server)
        flush(redis_server)
        until(lambda: members(redis_server) == said)
        other = Prefix(PROMPTS[0].namespace, [*PROMPTS[0].ids[:433], 7])
        # A busy machine may be too slow for the time that a lookup has.
        until(lambda: match(two, other).matched_tokens == 433)


def test_what_was_stored_while_redis_was_away_gets_there(tmp_path, redis_server):
    redis_server.kill()
    with serving(tmp_path, redis_server.url) as store:
        assert store.put(put_frames(PROMPTS[0]), lambda: None).stored
        until(lambda: not store.stats().redis_pending_bytes)
        redis_server.start()
        until(lambda: stored(store) == len(PROMPTS[0].spans()))
        redis_server.kill()
        assert store.put(put_frames(MEDIA), lambda: None).stored
        until(lambda: not store.stats().redis_pending_bytes)
        redis_server.start()
        until(lambda: not store._upkeep._refill._lost and len(keys(redis_server)[0]) > 30)
        until(lambda: not store.stats().redis_pending_bytes)
    with serving(tmp_path, redis_server.url) as again:
        for prefix in (PROMPTS[0], MEDIA):
            assert fetched(again, prefix) == whole(prefix)


def test_a_tenant_gets_no_more_than_its_limit_allows(tmp_path, redis_server):
    prefix = Prefix(bytes(32), range(1000), tenant=b"t" * 16)
    with serving(tmp_path, redis_server.url) as store:
        request = pb.SetQuotaRequest(tenant=prefix.tenant, redis_bytes=100 << 10)
        store.admin.operators.set_quota(request)
        put(store, prefix)
        quotas = store.catalog.quotas
        until(lambda: not quotas.over(prefix.tenant, "redis"))
        room = (100 << 10) - quotas.bytes_of(prefix.tenant, "redis")
        before = store.tiers.redis_status()["stored_bytes"]
        with closing(redis.Redis.from_url(redis_server.url)) as raw:
            raw.client_kill_filter(_type="normal", skipme=True)
        asked = store.tiers.redis_status()["lookups"]
        until(lambda: store.tiers.redis_status()["lookups"] > asked)
        until(lambda: not store._upkeep._refill._lost)
        assert store.tiers.redis_status()["stored_bytes"] - before <= room
        until(lambda: not store.stats().redis_pending_bytes)
        assert not quotas.over(prefix.tenant, "redis")


def test_who_forgets_what_is_lost_takes_nothing_from_who_writes_it_again(tmp_path, redis_server):
    """One store has it in memory and another only lists it; both see the loss at once."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with serving(folders[0], redis_server.url) as one:
        put(one, PROMPTS[0])
        with serving(folders[1], redis_server.url) as two:
            assert match(two, PROMPTS[0]).matched_tokens == LONG
            said = members(redis_server)
            # As if the first had been quicker between the second's question and what it does then.
            listed = two.catalog.redis.homes(two.catalog.select(lambda _: True))
            assert len(listed) == len(PROMPTS[0].spans())
            assert two._upkeep._refill._write(listed) == 0
            assert not two.catalog.select(lambda _: True)
            assert members(redis_server) == said
