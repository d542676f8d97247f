"""LMCache#4701: 4% of the pages were stored, the hit rate was high and the answers were wrong."""

import pytest
import redis
from case_helpers import (
    STORE,
    ask,
    assert_reused,
    assert_right,
    fill_redis,
    payload_keys,
    prompt,
    replica,
    tier_bytes,
)
from tiny_models import tiny_qwen

from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.payload import PayloadCodec
from tailreplay.store import serve_in_thread
from tailreplay.store.header import object_bytes
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.model


def test_what_is_stored_is_geometry_times_tokens(store, engine):
    before = tier_bytes(store)
    ask(engine, prompt(600))
    geometry = PayloadCodec(HybridModel(tiny_qwen()).dims).geometry
    rows = {Kind.KV: [256, 256, 88], Kind.HIDDEN: [64] * 9 + [24], Kind.CHECKPOINT: [1]}
    grown = {kind: size - before.get(kind, 0) for kind, size in tier_bytes(store).items()}
    assert grown == {
        kind: sum(object_bytes(geometry[kind], n) for n in counts) for kind, counts in rows.items()
    }


@pytest.mark.redis
def test_an_object_that_is_too_short_is_a_counted_miss(redis_server):
    tokens = prompt(600)
    fill_redis(redis_server.url, tokens)
    with redis.Redis.from_url(redis_server.url) as values:
        key = payload_keys(redis_server.url, "kv")[0]
        values.set(key, values.get(key)[: 1 << 12])
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        out = ask(engine, tokens)
        assert (out.report["mode"], out.report["lost"]) == ("miss", {"integrity": 599})
        assert server.store.stats().integrity_errors == 1
        assert_right(out, tokens)
        assert_reused(ask(engine, tokens).report, 599)
