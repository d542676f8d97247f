"""vllm#30931: adapters of one name and other weights shared a cache."""

import pytest
from blake3 import blake3
from case_helpers import WAIT_S, ask, prompt

from tailreplay.connector.client import StoreClient
from tailreplay.store.namespace import NamespaceFields
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model

TOKENS = prompt(300)


def namespace_of(weights: bytes) -> bytes:
    """The content of an adapter is in the name, and nothing else of it."""
    return NamespaceFields(
        model={"layers": 8}, weights_id="w", adapter_digest=blake3(weights).hexdigest()
    ).digest()


def test_an_adapter_is_its_content(store, engine):
    one, other = namespace_of(b"weights"), namespace_of(b"other weights")
    engine.namespace = one
    ask(engine, TOKENS)
    ids = extended_tokens(TOKENS)
    with StoreClient(store.address) as client:
        assert client.match(namespace_of(b"weights"), ids, timeout_s=WAIT_S).matched_tokens == 300
        assert client.match(other, ids, timeout_s=WAIT_S).matched_tokens == 0
