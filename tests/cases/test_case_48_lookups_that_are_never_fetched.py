"""LMCache#1034, vllm PR 35931: lookups pinned what nobody fetched, for ever."""

from lane_objects import WAIT_S, put
from store_objects import Prefix

from tailreplay.connector.client import StoreClient
from tailreplay.store import serve_in_thread

POOL_BYTES = 4 << 20


def test_a_thousand_lookups_pin_nothing_and_all_of_it_can_be_evicted():
    prefix = Prefix(bytes(range(32)), range(1, 701))
    with (
        serve_in_thread(pool_bytes=POOL_BYTES) as server,
        StoreClient(server.address, match_timeout_s=WAIT_S) as client,
    ):
        put(client, prefix)
        for _ in range(1000):
            assert client.match(prefix.namespace, prefix.tokens).matched_tokens == 700
        assert (client.stats().pinned_bytes, client.stats().leases) == (0, 0)
        server.store.catalog.room.make(POOL_BYTES)
        assert client.stats().pool_used_bytes == 0
