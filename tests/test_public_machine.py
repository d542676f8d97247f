"""Closing public prefixes takes out what it should and nothing else, whatever is stored around."""

import os
import random
import time
from pathlib import Path

import pytest
from store_objects import Prefix, put_frames
from tokens_file import TENANTS, write_tokens

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.auth import ADMINISTRATOR as ROOT
from tailreplay.store.config import StoreConfig
from tailreplay.store.core import Store
from tailreplay.store.errors import InvalidRequest, StoreUnavailable
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind
from tailreplay.store.publisher import Publisher
from tailreplay.store.tokens import to_wire

KV, HIDDEN, CHECKPOINT = Kind
BLOCK = KV_BLOCK_TOKENS


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("machine")
    config = StoreConfig(
        listen=f"unix://{folder}/store.sock",
        pool_bytes=64 << 20,
        token_file=write_tokens(folder / "tokens.json", **TENANTS),
    )
    store = Store(config)
    yield store
    store.close()


def some_ids(random: random.Random) -> list[int]:
    """Few enough ways that prompts share whole blocks, pages of a block, and parts of a page."""
    pages = [[way * 100_000 + at for at in range(PAGE_TOKENS)] for way in range(2)]
    ids: list[int] = []
    for _ in range(random.randint(3, 14)):
        ids += pages[random.random() < 0.2]
    return ids[: random.choice([len(ids), len(ids) - 30])]


class World:
    """What should be there: prompts put, and what of them has been taken out."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.space = os.urandom(32)
        self.kept = ROOT.scoped(self.space)
        self.there: dict[tuple[Kind, bytes], None] = {}
        self.put_prefixes: list[Prefix] = []
        self.public: dict[bytes, list[bytes]] = {}

    def put(self, ids: list[int]) -> None:
        prefix = Prefix(self.space, ids)
        self.store.put(put_frames(prefix), lambda: None, ROOT)
        self.put_prefixes.append(prefix)
        for kind, _, end in prefix.spans():
            self.there[kind, prefix.chain.prefix_hash(end)] = None

    def open(self, prefix: Prefix) -> None:
        names = [prefix.chain.prefix_hash(end) for end in range(BLOCK, len(prefix) + 1, BLOCK)]
        if names:
            request = pb.AddPublicRequest(namespace=self.space, tokens=to_wire(prefix.tokens))
            self.store.admin.publisher.add(request)
            self.public[names[-1]] = names

    def close(self, name: bytes) -> None:
        answer = self.store.admin.publisher.remove(pb.RemovePublicRequest(prefix_hash=name))
        names = self.public.pop(name)
        spared = {block for blocks in self.public.values() for block in blocks}
        own = [block for block in names if block not in spared]
        assert answer.kept_tokens == (len(names) - len(own)) * BLOCK
        if own:
            self._forget((len(names) - len(own)) * BLOCK, own[0], spared)
        assert (answer.cpu_objects_left, answer.held_objects) == (0, 0)

    def _forget(self, first: int, block: bytes, spared: set[bytes]) -> None:
        """Takes out what goes with the block that begins at a token."""
        parent = next(
            prefix.chain.prefix_hash(first)
            for prefix in self.put_prefixes
            if len(prefix) >= first + BLOCK and prefix.chain.prefix_hash(first + BLOCK) == block
        )
        stays: set[tuple[Kind, bytes]] = set()
        goes: set[tuple[Kind, bytes]] = set()
        for prefix in self.put_prefixes:
            hash_at = prefix.chain.prefix_hash
            beside = len(prefix) > first and hash_at(first) == parent
            behind = beside and len(prefix) >= first + BLOCK and hash_at(first + BLOCK) == block
            for kind, _, end in prefix.spans():
                name = (kind, hash_at(end))
                if kind is CHECKPOINT:
                    gone = beside and (behind or end <= first + BLOCK) and end > first
                else:
                    gone = behind and end > first
                if gone and name[1] not in spared:
                    goes.add(name)
                elif (KV, hash_at(min(-(-end // BLOCK) * BLOCK, len(prefix)))) in self.there:
                    stays.add(name)  # its block is there, so that its page is not the other's alone
        for name in goes - stays:
            self.there.pop(name, None)
        self.put_prefixes = [
            prefix
            for prefix in self.put_prefixes
            if any(
                (kind, prefix.chain.prefix_hash(end)) in self.there
                for kind, _, end in prefix.spans()
            )
        ]

    def check(self) -> None:
        found = self.store.catalog.select(lambda r: r.name.namespace == self.kept)
        assert {(r.name.kind, r.name.prefix_hash) for r in found} == set(self.there)
        for names in self.public.values():
            stored = [(KV, name) in self.there for name in names]
            opened = [self.store.catalog.public.has(self.kept, name) for name in names]
            assert all(opened)
            path = self.store.catalog.path_with_public(bytes(32), self.kept, bytes(32) + names[-1])
            if all(stored):
                assert [record.name.prefix_hash for record in path.kv] == names


@pytest.mark.parametrize("seed", range(40))
def test_what_is_there_is_what_should_be(store, seed):
    rolls = random.Random(seed)
    world = World(store)
    for _ in range(rolls.randint(2, 7)):
        world.put(some_ids(rolls))
    for prefix in rolls.sample(world.put_prefixes, rolls.randint(1, len(world.put_prefixes))):
        world.open(prefix)
    world.check()
    while world.public:
        world.close(rolls.choice(list(world.public)))
        world.check()


def test_what_was_closed_and_not_erased_is_erased_by_asking_again(store):
    class Away:
        """Redis, as it is gone between two questions."""

        def everywhere(self, *_: object) -> None:
            raise StoreUnavailable("Redis does not answer")

    world = World(store)
    world.put([*range(600)])
    (prefix,) = world.put_prefixes
    how = {"has_tenants": True, "clock": time.monotonic}
    names = store.client_names
    away = Publisher(store.catalog, Away(), None, names, **how)
    world.open(prefix)
    asked = pb.RemovePublicRequest(prefix_hash=prefix.chain.prefix_hash(512))
    with pytest.raises(StoreUnavailable):
        away.remove(asked)
    assert not store.catalog.public.has_any(world.kept)
    away._erasures = store.admin.erasures  # it is back
    assert sum(t.objects for t in away.remove(asked).removed) == 3 + 10 + 1
    with pytest.raises(InvalidRequest):
        away.remove(asked)
