"""What a store finds in Redis against a plain list of what is there."""

import os
from contextlib import closing

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from index_entries import shared_tokens
from redis_server import RedisServer, servers_at
from store_objects import Prefix

from tailreplay.store.catalog import Catalog
from tailreplay.store.index import TokenIndex
from tailreplay.store.manifest import Manifests
from tailreplay.store.manifest_form import Entry, manifest_key
from tailreplay.store.objects import Provenance
from tailreplay.store.shared_index import SharedIndex

pytestmark = pytest.mark.redis

KV = Entry("k", 100, Provenance.EXACT)


class RedisAgainstList(RuleBasedStateMachine):
    """Few sequences, of one or two runs over two tokens, so that all meet again and fork."""

    server: RedisServer
    lengths = st.lists(st.sampled_from([1, 2, 100, 256, 257]), min_size=1, max_size=2)
    ids = st.builds(
        lambda lengths, first: tuple(
            (first + run) % 2 for run, length in enumerate(lengths) for _ in range(length)
        ),
        lengths,
        st.integers(0, 1),
    )

    def __init__(self):
        super().__init__()
        self.namespace = os.urandom(32)
        self.raw = redis.Redis.from_url(self.server.url)
        self.manifests = Manifests(servers_at(self.server.url), "t:", 60.0)
        self.index = SharedIndex(servers_at(self.server.url), "t:", 5.0)
        # What is there: the whole prefix up to the end of each block.
        self.blocks: set[tuple[int, ...]] = set()

    def teardown(self):
        self.index.close()
        self.manifests.close()
        self.raw.close()

    @rule(ids=ids)
    def another_store_puts(self, ids):
        prompt, tree = Prefix(self.namespace, ids).prompt, TokenIndex()
        ends = [*range(256, len(ids), 256), len(ids)]
        blocks = [tree.block(prompt, tree.insert(prompt, end)) for end in ends]
        assert all(self.manifests.commit((block, KV) for block in blocks))
        self.blocks |= {ids[:end] for end in ends}

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def a_manifest_expires(self, data):
        ids = data.draw(st.sampled_from(sorted(self.blocks)))
        name = Prefix(self.namespace, ids).chain.prefix_hash(len(ids))
        self.raw.delete(manifest_key("t:", self.namespace, name))
        self.blocks.remove(ids)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def keys_and_values_are_lost(self, data):
        ids = data.draw(st.sampled_from(sorted(self.blocks)))
        node = TokenIndex().insert(Prefix(self.namespace, ids).prompt)
        self.manifests.forget([(node.called(self.namespace), "k")])
        self.blocks.remove(ids)

    @rule(ids=ids)
    def finds_what_the_list_says(self, ids):
        catalog = Catalog(None)
        found = catalog.match(Prefix(self.namespace, ids).prompt, self.index)
        assert found.matched_tokens == found.kv_tokens == self.longest(ids)
        self.index._asked.clear()  # each example is a minute later

    def longest(self, ids) -> int:
        """Tokens of the longest prefix without a hole, and of the sibling that shares most on."""
        at = 0
        while at + 256 <= len(ids) and ids[: at + 256] in self.blocks:
            at += 256
        children = [b for b in self.blocks if at < len(b) <= at + 256 and b[:at] == ids[:at]]
        return at + max((shared_tokens(b[at:], ids[at:]) for b in children), default=0)


def test_one_behind_stale_neighbours_is_found_though_another_side_has_less():
    """Where members stand is up to their digests, so that many namespaces try many orders."""
    with (
        closing(RedisServer()) as server,
        closing(redis.Redis.from_url(server.url)) as raw,
        closing(Manifests(servers_at(server.url), "t:", 60.0)) as manifests,
        closing(SharedIndex(servers_at(server.url), "t:", 5.0)) as index,
    ):
        base = list(range(256))
        for number in range(60):
            space, tree = number.to_bytes(32, "big"), TokenIndex()
            for child, shared in enumerate((100, 100, 100, 90, 50)):
                prefix = Prefix(space, [*base[:shared], 1000 + child])
                block = tree.block(prefix.prompt, tree.insert(prefix.prompt))
                assert all(manifests.commit([(block, KV)]))
                if shared == 100:
                    raw.delete(manifest_key("t:", space, block.prefix_hash))
            found = Catalog(None).match(Prefix(space, base).prompt, index)
            assert found.matched_tokens == 90


RedisAgainstList.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None
)


class TestRedisAgainstList(RedisAgainstList.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = RedisAgainstList.server = RedisServer()

    @classmethod
    def tearDownClass(cls):
        with closing(cls.server):
            pass
