"""vllm#37961, #52655: with a salt for each tenant nobody shared the common system prompt."""

import pytest
from case_helpers import (
    STORE,
    WAIT_S,
    ask_as,
    assert_reused,
    assert_right,
    prompt,
    tier_bytes,
)
from tokens_file import bearer, operating, write_tokens

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import serve_in_thread
from tailreplay.store.tokens import extended_tokens, to_wire

pytestmark = pytest.mark.model

SYSTEM = prompt(512)
TENANTS = [f"tenant{i}" for i in range(4)]


def kv_objects(server):
    tiers = server.store.stats().tiers
    return sum(t.objects for t in tiers if (t.tier, t.kind) == (pb.TIER_CPU, pb.KIND_KV))


def test_a_public_prefix_is_prefilled_once_and_the_rest_stays_with_its_tenant(tmp_path):
    bearers = {name: {"tenant": name} for name in TENANTS} | {"root": {"role": "admin"}}
    file = write_tokens(tmp_path / "tokens.json", **bearers)
    with serve_in_thread(token_file=file, **STORE) as server:

        def asked_by(name, tokens):
            return ask_as(server, bearer(tmp_path, name), tokens)

        # One token more than the prefix, so that a state is kept at its very end.
        asked_by("root", [*SYSTEM, 0])
        assert (kv_objects(server), bool(tier_bytes(server))) == (3, True)
        asked = pb.AddPublicRequest(
            namespace=next(iter(server.store.catalog.namespaces())),
            tokens=to_wire(extended_tokens(SYSTEM)),
        )
        with operating(server, tmp_path) as admin:
            assert admin.AddPublic(asked, timeout=WAIT_S).stored_tokens == 512
        own = {name: SYSTEM + prompt(90, seed=i) for i, name in enumerate(TENANTS, 1)}
        for count, (name, tokens) in enumerate(own.items(), 1):
            out = asked_by(name, tokens)
            assert_reused(out.report, 512)
            assert (out.report["recomputed_tokens"], out.report["replayed_tokens"]) == (0, 0)
            assert_right(out, tokens)
            assert kv_objects(server) == 3 + count  # its own block, and none of the two before
        for name, tokens in own.items():
            assert_reused(asked_by(name, tokens).report, 601)
        for name, tokens in zip(TENANTS, reversed(own.values()), strict=True):
            assert_reused(asked_by(name, tokens).report, 512)
