"""vllm#54458: a prompt of 12 tokens took a third of the pool, since blocks had 7,808 tokens."""

import os

import pytest
from store_objects import GEOMETRY, Client, Prefix

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.header import header_bytes
from tailreplay.store.objects import Kind

KV, HIDDEN, _ = Kind
PAGE_BYTES = 4096
"""What the pool rounds an object up to."""


@pytest.fixture
def client(store):
    client = Client(store.address)
    yield client
    client.close()


def cpu_bytes(client: Client) -> dict[int, int]:
    return {t.kind: t.bytes for t in client.stats().tiers if t.tier == pb.TIER_CPU}


@pytest.mark.parametrize("tokens", [1, 12, 255, 256, 257, 1000])
def test_a_prompt_takes_what_its_tokens_take(client, tokens):
    prefix = Prefix(os.urandom(32), range(tokens))
    spans = prefix.spans(KV, HIDDEN)
    before, pool_before = cpu_bytes(client), client.stats().pool_used_bytes
    client.put(prefix, spans)
    after = cpu_bytes(client)
    payload = 0
    for kind in (KV, HIDDEN):
        rows = sum(GEOMETRY[kind].payload_bytes(1) for _ in range(tokens))
        headers = sum(
            header_bytes(GEOMETRY[kind].units * -(-(end - first) // 64))
            for of, first, end in spans
            if of is kind
        )
        assert after[kind] - before.get(kind, 0) == rows + headers
        payload += rows + headers
    taken = client.stats().pool_used_bytes - pool_before
    assert payload <= taken <= payload + len(spans) * PAGE_BYTES
