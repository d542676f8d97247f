"""Manifests in Redis: the commit marker of every payload there, and the index's memory.

`manifest_form.py` says what they consist of.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.manifest_form import (
    NAME_BYTES,
    NAMES_BYTES,
    children_key,
    literal,
    pack_block,
    pack_entry,
    parsed_manifest,
)
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.objects import Kind
from tailreplay.store.renewal import BlockName

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
        owners, parents = [], []
        for (block, entry), life_ms in zip(entries, lives_ms, strict=True):
            owners.append(self._servers.owner(block.prefix_hash))
            self._add(self._pipe(pipes, owners[-1]), block, entry, life_ms)
            if entry.kind is Kind.KV:
                # A member says nothing without its manifest, wherever that is.
                pipe = self._pipe(pipes, self._servers.owner(block.parent_hash))
                siblings = children_key(self._key(block.namespace, block.parent_hash))
                pipe.zadd(siblings, {block.digests + block.prefix_hash: 0})
                pipe.pexpire(siblings, self._ttl_ms)
                parents.append((block.namespace, block.parent_hash))
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        self._tidy_now_and_then(parents)
        return [
            0.0 if answers[owner] is None else life_ms / 1000
            for owner, life_ms in zip(owners, lives_ms, strict=True)
        ]

    def _lives_ms(self, blocks: Sequence[Block]) -> list[int]:
        """How long each manifest is to live: as long as it does, or a whole life if there is none.

        Asked first, as Redis can do it in one command from 7.0 on alone.
        """
        pipes: dict[int, Pipeline] = {}
        owners = [self._servers.owner(block.prefix_hash) for block in blocks]
        for owner, block in zip(owners, blocks, strict=True):
            self._pipe(pipes, owner).pttl(self._key(block.namespace, block.prefix_hash))
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        each = {server: iter(found or ()) for server, found in answers.items()}
        lives_ms = [next(each[owner], 0) for owner in owners]
        return [life_ms if life_ms > 0 else self._ttl_ms for life_ms in lives_ms]

    def read(self, blocks: Iterable[tuple[bytes, bytes]]) -> list[tuple[Block, list[Entry]]]:
        """The manifests of blocks, by namespace and name, as far as they are there."""
        keys: dict[int, list[bytes]] = {}
        for namespace, prefix_hash in blocks:
            keys.setdefault(self._servers.owner(prefix_hash), []).append(
                self._key(namespace, prefix_hash)
            )
        found: list[tuple[Block, list[Entry]]] = []
        for server, some in keys.items():
            client = self._servers.clients[server]
            found += self._run(server, partial(self._read_all, client, some)) or []
        return found

    def _read_all(
        self, client: redis.Redis, keys: Sequence[bytes]
    ) -> list[tuple[Block, list[Entry]]]:
        return list(self._read(client, keys))

    def renew(self, blocks: Sequence[Block]) -> list[BlockName]:
        """Gives manifests, and the sets that blocks are members of, a new life.

        Returns:
            Namespace and name of those that are there and have it.
        """
        pipes: dict[int, Pipeline] = {}
        answers_at = []
        for block in blocks:
            owner = self._servers.owner(block.prefix_hash)
            pipe = self._pipe(pipes, owner)
            pipe.pexpire(self._key(block.namespace, block.prefix_hash), self._ttl_ms)
            answers_at.append((owner, len(pipe) - 1))
            pipe = self._pipe(pipes, self._servers.owner(block.parent_hash))
            pipe.pexpire(children_key(self._key(block.namespace, block.parent_hash)), self._ttl_ms)
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        return [
            BlockName(block.namespace, block.prefix_hash)
            for block, (server, at) in zip(blocks, answers_at, strict=True)
            if (answer := answers[server]) is not None and answer[at]
        ]

    def _tidy_now_and_then(self, parents: Sequence[tuple[bytes, bytes]]) -> None:
        """Looks through some children of one parent, once for every so many that were added.

        So stale members never are much more than half of a set, however long it lives.
        """
        with self._lock:
            before, self._added = self._added, self._added + len(parents)
            due = self._added // _TIDY_EVERY > before // _TIDY_EVERY
        if due:
            self.tidy(*parents[-1])

    def tidy(self, namespace: bytes, parent_hash: bytes) -> int:
        """Takes out stale members among some children of a block; returns how many."""
        server = self._servers.owner(parent_hash)
        key = children_key(self._key(namespace, parent_hash))
        client = self._servers.clients[server]
        found: Any = self._run(server, lambda: client.zrandmember(key, _TIDIED))
        members: list[bytes] = found or []
        there = self._have_manifests(namespace, [member[-NAME_BYTES:] for member in members])
        stale = [m for m, is_there in zip(members, there, strict=True) if not is_there]
        if stale:
            self._run(server, lambda: client.zrem(key, *stale))
        return len(stale)

    def _have_manifests(self, namespace: bytes, names: Sequence[bytes]) -> list[bool]:
        """For each block whether it has one, or may have one that can not be read now."""
        pipes: dict[int, Pipeline] = {}
        owners = [self._servers.owner(name) for name in names]
        for owner, name in zip(owners, names, strict=True):
            self._pipe(pipes, owner).exists(self._key(namespace, name))
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

    def forget(self, entries: Iterable[tuple[bytes, bytes, str]]) -> None:
        """Takes fields away; the payloads behind them count as gone from then on.

        Args:
            entries: namespace and name of each block, and the field.

        Raises:
            StoreUnavailable: Redis did not take all of it.
        """
        by_server: dict[int, list[tuple[bytes, str]]] = {}
        for namespace, prefix_hash, field in entries:
            key = self._key(namespace, prefix_hash)
            by_server.setdefault(self._servers.owner(prefix_hash), []).append((key, field))
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
        self, client: redis.Redis, keys: Sequence[bytes]
    ) -> Iterator[tuple[Block, list[Entry]]]:
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
            pipe.pttl(key)
        answers = iter(pipe.execute(raise_on_error=False))
        # What answers with an error of its own, as a key of another type does, is a miss.
        for key, fields, life_ms in zip(keys, answers, answers, strict=True):
            if not isinstance(fields, dict) or not isinstance(life_ms, int):
                continue
            manifest = parsed_manifest(key, key[len(self._prefix) :], fields, self._seal)
            if manifest is not None:
                block, entries = manifest
                yield (
                    block,
                    [dataclasses.replace(entry, life_s=life_ms / 1000) for entry in entries],
                )

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


def _reason(error: redis.RedisError) -> str:
    """What Redis said, without the command that a pipeline repeats: it holds hashes."""
    return str(error).rpartition(" caused error: ")[2]
