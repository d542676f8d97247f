"""LMCache#4533, PR 4558, Mooncake#3140, PR 3003: flipped bits in the remote tier were served."""

import pytest
import redis
from case_helpers import (
    STORE,
    WAIT_S,
    ask,
    assert_reused,
    assert_right,
    fill_redis,
    payload_keys,
    policy,
    prompt,
    replica,
)

from tailreplay.connector.client import StoreClient
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.tokens import extended_tokens

pytestmark = [pytest.mark.model, pytest.mark.redis]

TOKENS = prompt(600)


def flip(url, kind):
    """Flips one bit in the middle of one value; returns its key."""
    with redis.Redis.from_url(url) as values:
        key = payload_keys(url, kind)[0]
        value = bytearray(values.get(key))
        value[len(value) // 2] ^= 4
        values.set(key, bytes(value))
    return key


def test_the_value_is_missed_counted_and_deleted(redis_server):
    fill_redis(redis_server.url, TOKENS)
    key = flip(redis_server.url, "kv")
    ids = extended_tokens(TOKENS)
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
        StoreClient(server.address) as client,
        redis.Redis.from_url(redis_server.url) as values,
    ):
        leaf = client.match(engine.namespace, ids, timeout_s=WAIT_S).leaf
        wanted = [pb.Range(kind=pb.KIND_KV, first_token=0, end_token=600)]
        records = [s.record for s in client.fetch(engine.namespace, leaf, wanted, timeout_s=WAIT_S)]
        reasons = [r.code for r in records if r.kind is RecordKind.MISSING]
        assert reasons == [pb.MISS_REASON_INTEGRITY]
        assert server.store.stats().integrity_errors == 1
        assert not values.exists(key)

        out = ask(engine, TOKENS)
        assert out.report["matched_tokens"] == out.report["used_tokens"] + sum(
            out.report["lost"].values()
        )
        assert_right(out, TOKENS)
        assert_reused(ask(engine, TOKENS).report, 599)
        assert server.store.stats().integrity_errors == 1


@pytest.mark.parametrize("kind", ["hidden", "checkpoint"])
def test_hiddens_and_states_are_checked_just_so(redis_server, kind):
    fill_redis(redis_server.url, TOKENS)
    flip(redis_server.url, kind)
    how = policy("tail", replay_ratio=1.0) if kind == "hidden" else policy()
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        out = ask(engine, TOKENS, policy=how)
        assert (out.report["mode"], out.report["lost"]) == ("miss", {"integrity": 599})
        assert server.store.stats().integrity_errors == 1
        assert_right(out, TOKENS)
