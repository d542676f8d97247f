"""LMCache#4991: a write that failed half way left its name visible, and readers got gibberish."""

import pytest
import redis
from case_helpers import (
    STORE,
    WAIT_S,
    ask,
    assert_reused,
    assert_right,
    fill_redis,
    prompt,
    replica,
)

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model

TOKENS = prompt(300)


def test_an_object_that_breaks_off_is_not_there(store, engine, request):
    announced = pb.PutObject(kind=pb.KIND_KV, first_token=0, end_token=256, size_bytes=1 << 17)
    half = ObjectBytes(announced, (bytes(1 << 16),))
    ids = extended_tokens(TOKENS)
    whose = tenant_digest(request.node.nodeid)
    used = store.store.tiers.used_bytes
    with StoreClient(store.address, lanes=False) as client:
        with pytest.raises(InvalidRequest, match="65536 bytes"):
            client.put(engine.namespace, ids, [half], timeout_s=WAIT_S, tenant=whose)
        assert client.match(engine.namespace, ids, timeout_s=WAIT_S).matched_tokens == 0
    assert store.store.tiers.used_bytes == used
    out = ask(engine, TOKENS)
    assert out.report["miss_reason"] == "not_stored"
    assert_reused(ask(engine, TOKENS).report, 299)


@pytest.mark.redis
def test_payloads_whose_commit_was_never_written_are_not_there(redis_server):
    fill_redis(redis_server.url, TOKENS)
    with redis.Redis.from_url(redis_server.url) as values:
        commits = list(values.scan_iter(match="tailreplay:m:*", count=1000))
        assert commits
        values.delete(*commits)
        assert values.dbsize() > 0
    with (
        serve_in_thread(redis_url=redis_server.url, **STORE) as server,
        replica(server.address) as engine,
    ):
        out = ask(engine, TOKENS)
        assert (out.report["matched_tokens"], out.report["miss_reason"]) == (0, "not_stored")
        assert_right(out, TOKENS)
        assert_reused(ask(engine, TOKENS).report, 299)
