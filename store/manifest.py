"""Manifests in Redis: the commit marker of every payload there, and the index's memory.

`manifest_form.py` says what they consist of.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.manifest_form import (
    NAMES_BYTES,
    children_key,
    literal,
    pack_block,
    pack_entry,
    pack_member,
    parsed_manifest,
    parsed_member,
)
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.objects import Kind
from tailreplay.store.placement import children_placed_by, digest_of
from tailreplay.store.views import BlockName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from redis.client import Pipeline

    from tailreplay.store.manifest_form import Entry
    from tailreplay.store.manifest_seal import Seal
    from tailreplay.store.redis_servers import RedisServers
    from tailreplay.store.views import Block

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SCAN_COUNT = 1000
_TIDY_EVERY = 16
_TIDIED = 32
MOST_LOADED = 500_000
"""Manifests of one server read at a start: some two gigabytes while they are listed."""


class Manifests:
    """Reads and writes manifests. Thread-safe; every call is bounded by the socket timeout.

    Args:
        servers: where they are.
        key_prefix: in front of every key.
        ttl_s: life of a manifest; shorter than that of payloads.
        seal: the form of values.

    Attributes:
        whole: whether the last `load` read every server.
        ttl_s: as given.
    """

    def __init__(
        self, servers: RedisServers, key_prefix: str, ttl_s: float, seal: Seal = MARKS
    ) -> None:
        self._servers = servers
        self._seal = seal
        self._prefix = key_prefix.encode() + b"m:"
        self.ttl_s = ttl_s
        self._ttl_ms = int(ttl_s * 1000)
        self.whole = False
        # Guarded by _lock: the servers whose last call failed, and children added so far.
        self._lock = threading.Lock()
        self._failing: set[int] = set()
        self._added = 0

    def commit(self, entries: Iterable[tuple[Block, Entry]]) -> list[float]:
        """Makes payloads that are in Redis findable.

        A manifest that is there keeps the life it has, since what it names already is older.

        Returns:
            For each entry how long its manifest lives, seconds; 0 when it was not taken.
        """
        entries = list(entries)
        lives_ms = self._lives_ms([block for block, _ in entries])
        pipes: dict[int, Pipeline] = {}
        owners, children = [], []
        for (block, entry), life_ms in zip(entries, lives_ms, strict=True):
            owners.append(self._owner(block.called))
            self._add(self._pipe(pipes, owners[-1]), block, entry, life_ms)
            if entry.kind is Kind.KV:
                # A member says nothing without its manifest, wherever that is.
                pipe = self._pipe(pipes, self._owner(_siblings(block)))
                siblings = children_key(self._key(block.namespace, block.parent_hash))
                pipe.zadd(siblings, {pack_member(block): 0})
                pipe.pexpire(siblings, self._ttl_ms)
                children.append(block)
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        self._tidy_now_and_then(children)
        return [
            0.0 if answers[owner] is None else life_ms / 1000
            for owner, life_ms in zip(owners, lives_ms, strict=True)
        ]

    def _lives_ms(self, blocks: Sequence[Block]) -> list[int]:
        """How long each manifest is to live: as long as it does, or a whole life if there is none.

        Asked first, as Redis can do it in one command from 7.0 on alone.
        """
        pipes: dict[int, Pipeline] = {}
        owners = [self._owner(block.called) for block in blocks]
        for owner, block in zip(owners, blocks, strict=True):
            self._pipe(pipes, owner).pttl(self._key(block.namespace, block.prefix_hash))
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        each = {server: iter(found or ()) for server, found in answers.items()}
        lives_ms = [next(each[owner], 0) for owner in owners]
        return [life_ms if life_ms > 0 else self._ttl_ms for life_ms in lives_ms]

    def read(self, blocks: Iterable[BlockName]) -> list[tuple[Block, list[Entry]]]:
        """The manifests of blocks, as far as they are there."""
        by_server: dict[int, list[BlockName]] = {}
        for block in blocks:
            by_server.setdefault(self._owner(block), []).append(block)
        found: list[tuple[Block, list[Entry]]] = []
        for server, some in by_server.items():
            client = self._servers.clients[server]
            found += self._run(server, partial(self._read_named, client, some)) or []
        return found

    def _read_named(
        self, client: redis.Redis, blocks: Sequence[BlockName]
    ) -> list[tuple[Block, list[Entry]]]:
        keys = [self._key(block.namespace, block.prefix_hash) for block in blocks]
        return list(self._read(client, keys, [block.placed_by for block in blocks]))

    def renew(self, blocks: Sequence[Block]) -> list[BlockName]:
        """Gives manifests, and the sets that blocks are members of, a new life.

        Returns:
            What those are called that are there and have it.
        """
        pipes: dict[int, Pipeline] = {}
        answers_at = []
        for block in blocks:
            owner = self._owner(block.called)
            pipe = self._pipe(pipes, owner)
            pipe.pexpire(self._key(block.namespace, block.prefix_hash), self._ttl_ms)
            answers_at.append((owner, len(pipe) - 1))
            pipe = self._pipe(pipes, self._owner(_siblings(block)))
            pipe.pexpire(children_key(self._key(block.namespace, block.parent_hash)), self._ttl_ms)
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        return [
            block.called
            for block, (server, at) in zip(blocks, answers_at, strict=True)
            if (answer := answers[server]) is not None and answer[at]
        ]

    def _tidy_now_and_then(self, children: Sequence[Block]) -> None:
        """Looks through some children of one parent, once for every so many that were added.

        So stale members never are much more than half of a set, however long it lives.
        """
        with self._lock:
            before, self._added = self._added, self._added + len(children)
            due = self._added // _TIDY_EVERY > before // _TIDY_EVERY
        if due:
            self.tidy(children[-1])

    def tidy(self, child: Block) -> int:
        """Takes out stale members among some siblings of a block; returns how many."""
        server = self._owner(_siblings(child))
        key = children_key(self._key(child.namespace, child.parent_hash))
        client = self._servers.clients[server]
        found: Any = self._run(server, lambda: client.zrandmember(key, _TIDIED))
        members: list[bytes] = found or []
        parsed = [parsed_member(member, child.first_token) for member in members]
        there = self._have_manifests(
            [
                BlockName(child.namespace, m.prefix_hash, m.placed_by or child.placed_by)
                for m in parsed
            ]
        )
        stale = [m for m, is_there in zip(members, there, strict=True) if not is_there]
        if stale:
            self._run(server, lambda: client.zrem(key, *stale))
        return len(stale)

    def _have_manifests(self, blocks: Sequence[BlockName]) -> list[bool]:
        """For each block whether it has one, or may have one that can not be read now."""
        pipes: dict[int, Pipeline] = {}
        owners = [self._owner(block) for block in blocks]
        for owner, block in zip(owners, blocks, strict=True):
            self._pipe(pipes, owner).exists(self._key(block.namespace, block.prefix_hash))
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        each = {server: iter(found) for server, found in answers.items() if found is not None}
        return [owner not in each or bool(next(each[owner])) for owner in owners]

    def _pipe(self, pipes: dict[int, Pipeline], server: int) -> Pipeline:
        if server not in pipes:
            pipes[server] = self._servers.clients[server].pipeline(transaction=False)
        return pipes[server]

    def _add(self, pipe: Pipeline, block: Block, entry: Entry, life_ms: int) -> None:
        key = self._key(block.namespace, block.prefix_hash)
        fields = {"b": pack_block(block), entry.field: pack_entry(entry)}
        wrap = self._seal.wrap
        pipe.hset(key, mapping={f: wrap(key, f.encode(), v) for f, v in fields.items()})
        pipe.pexpire(key, life_ms)

    def forget(self, entries: Iterable[tuple[BlockName, str]]) -> None:
        """Takes fields away; the payloads behind them count as gone from then on.

        Args:
            entries: blocks, and a field of each.

        Raises:
            StoreUnavailable: Redis did not take all of it.
        """
        by_server: dict[int, list[tuple[bytes, str]]] = {}
        for block, field in entries:
            key = self._key(block.namespace, block.prefix_hash)
            by_server.setdefault(self._owner(block), []).append((key, field))
        done = [self._forget(server, fields) for server, fields in by_server.items()]
        if not all(done):
            raise StoreUnavailable(f"{done.count(False)} Redis servers did not forget manifests")

    def _forget(self, server: int, fields: Sequence[tuple[bytes, str]]) -> bool:
        pipe = self._servers.clients[server].pipeline(transaction=False)
        for key, field in fields:
            pipe.hdel(key, field)
        return self._run(server, pipe.execute) is not None

    def load(
        self, most: int = MOST_LOADED, namespace: bytes = b""
    ) -> list[tuple[Block, list[Entry]]]:
        """Every manifest that can be read, ordered so that a block comes after the one before it.

        Args:
            most: manifests of each server; the others are found when they are looked for.
            namespace: whose, if not all are wanted.

        Raises:
            StoreUnavailable: no server can be read.
        """
        each = [
            self._run(server, partial(self._scan, client, most, namespace))
            for server, client in enumerate(self._servers.clients)
        ]
        found = [manifests for manifests in each if manifests is not None]
        self.whole = len(found) == len(each)
        if not found:
            raise StoreUnavailable("no Redis server gives manifests")
        listed = [manifest for manifests in found for manifest in manifests]
        return sorted(listed, key=lambda item: (item[0].first_token, len(item[0].digests) > 0))

    def servers_of(self, block: Block) -> set[int]:
        """Numbers of the servers that have a block's manifest, and the set that it is in."""
        return {self._owner(block.called), self._owner(_siblings(block))}

    def close(self) -> None:
        """Closes the connections."""
        self._servers.close()

    def _scan(
        self, client: redis.Redis, most: int, namespace: bytes
    ) -> list[tuple[Block, list[Entry]]]:
        found: list[tuple[Block, list[Entry]]] = []
        keys: list[bytes] = []
        pattern = self._prefix + literal(namespace) + b"*"
        for key in client.scan_iter(match=pattern, count=_SCAN_COUNT):
            if len(key) == len(self._prefix) + NAMES_BYTES:  # others are sets of children
                keys.append(key)
            if len(keys) == _SCAN_COUNT:
                found += self._read(client, keys)
                keys = []
            if len(found) >= most:
                logger.info(
                    "of one server's manifests %d are listed, the rest when asked for", most
                )
                return found
        return [*found, *self._read(client, keys)]

    def _read(
        self, client: redis.Redis, keys: Sequence[bytes], placed_by: Iterable[bytes] = ()
    ) -> Iterator[tuple[Block, list[Entry]]]:
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
            pipe.pttl(key)
        answers = iter(pipe.execute(raise_on_error=False))
        # What answers with an error of its own, as a key of another type does, is a miss.
        placed = chain(placed_by, repeat(b""))
        for key, fields, life_ms, at in zip(keys, answers, answers, placed, strict=False):
            if not isinstance(fields, dict) or not isinstance(life_ms, int):
                continue
            manifest = parsed_manifest(key, key[len(self._prefix) :], fields, self._seal, at)
            if manifest is not None:
                block, entries = manifest
                yield (
                    block,
                    [dataclasses.replace(entry, life_s=life_ms / 1000) for entry in entries],
                )

    def _owner(self, block: BlockName) -> int:
        return self._servers.owner(digest_of(block.namespace, block.placed_by))

    def _key(self, namespace: bytes, prefix_hash: bytes) -> bytes:
        return self._prefix + namespace + prefix_hash

    def _run(self, server: int, call: Callable[[], T]) -> T | None:
        """What a call to a server returns; None when it failed."""
        try:
            answer = call()
        except redis.RedisError as error:
            if self._changes(server, failing=True):
                logger.warning("Redis did not take or give manifests: %s", _reason(error))
            return None
        if self._changes(server, failing=False):
            logger.info("Redis takes and gives manifests again")
        return answer

    def _changes(self, server: int, *, failing: bool) -> bool:
        with self._lock:
            changed = (server in self._failing) != failing
            (self._failing.add if failing else self._failing.discard)(server)
        return changed


def _siblings(block: Block) -> BlockName:
    """What the set of a block's siblings is called by: the block before it."""
    own = block.called.placed_by
    at = children_placed_by(block.parent_hash, block.first_token, own)
    return BlockName(block.namespace, block.parent_hash, at)


def _reason(error: redis.RedisError) -> str:
    """What Redis said, without the command that a pipeline repeats: it holds hashes."""
    return str(error).rpartition(" caused error: ")[2]
