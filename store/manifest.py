"""Manifests in Redis: the commit marker of every payload there, and the index's memory.

One hash per block. Its fields say what the block is and which of its objects are in Redis; a field
is written after the payload it speaks of, and taken away before it. A payload without its field
does not exist. The hash lives shorter than the payloads, so that what it names can be read.

    field       value
    b           first token, parent hash, page hashes, running digests
    k           the kv object
    0 to 3      the hidden object of that page, with its tail figures
    c<token>:<digest>  the checkpoint after <token> tokens, whose prefix ends in a block after this
                one; the last token's digest tells siblings apart

Every value ends with a seal over the key, the field and itself, so that a manifest that is damaged
or lies under another's key is a miss. No token ids and no salts are in it: a namespace is a digest,
tokens are running digests.

A block with a `kv` object is also a member of the sorted set of its parent's children, under the
parent's key and a `z`, by which other stores find it (`shared_index.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
import struct
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from tailreplay.store.chain import DIGEST_BYTES
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.objects import (
    KV_BLOCK_TOKENS,
    MAX_TAIL_FIGURES_BYTES,
    PAGE_TOKENS,
    TAIL_FIGURE_BYTES,
    Kind,
    Provenance,
)
from tailreplay.store.renewal import BlockName
from tailreplay.store.tokens import MAX_TOKENS
from tailreplay.store.views import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from redis.client import Pipeline

    from tailreplay.store.manifest_seal import Seal
    from tailreplay.store.record import Record
    from tailreplay.store.redis_servers import RedisServers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK = struct.Struct("<IB32s")
_ENTRY = struct.Struct("<QB")
_STATE = struct.Struct("<32s8s")
_SCAN_COUNT = 1000
_TIDY_EVERY = 16
MOST_LOADED = 500_000
"""Manifests of one server read at a start: some two gigabytes while they are listed."""
_TIDIED = 32
NAME_BYTES = 32
"""Bytes of a prefix hash, with which a child's member ends."""
_NAMES_BYTES = 64
_PAGE_BYTES = PAGE_TOKENS * DIGEST_BYTES
_MAX_PAGES = KV_BLOCK_TOKENS // PAGE_TOKENS
_MAX_OBJECT_BYTES = 1 << 40
"""More than any object has: a header holds checksums of 2^18 pages, of 1 MiB at most."""
_FIELD = re.compile(rb"k|[0-3]|c[0-9]{1,10}:[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a block that is in Redis.

    Attributes:
        field: which object, as in the module's table.
        size: its bytes, header included.
        provenance: exact or approximate.
        state_hash: prefix hash of a checkpoint; empty for other kinds.
        state_digest: running digest of a checkpoint's last token; empty for other kinds.
        tail_figures: of a hidden object; may be empty.
        life_s: what was left of the manifest's life when it was read; 0 = not asked.
    """

    field: str
    size: int
    provenance: Provenance
    state_hash: bytes = b""
    state_digest: bytes = b""
    tail_figures: bytes = b""
    life_s: float = dataclasses.field(default=0.0, compare=False)

    @property
    def kind(self) -> Kind:
        """What the object holds."""
        if self.field.startswith("c"):
            return Kind.CHECKPOINT
        return Kind.KV if self.field == "k" else Kind.HIDDEN

    @property
    def page(self) -> int:
        """Number of a hidden object's page in its block."""
        return int(self.field)

    @property
    def end_token(self) -> int:
        """Tokens that a checkpoint has seen."""
        return int(self.field[1:].partition(":")[0])


def entry_of(record: Record) -> Entry:
    """What a manifest must say of an object, so that it can be listed again."""
    kind, size, provenance = record.name.kind, record.size, record.provenance
    if kind is Kind.KV:
        return Entry("k", size, provenance)
    if kind is Kind.HIDDEN:
        page = record.first_token % KV_BLOCK_TOKENS // PAGE_TOKENS
        return Entry(str(page), size, provenance, tail_figures=record.tail_figures)
    field = f"c{record.end_token}:{record.digest.hex()}"
    return Entry(field, size, provenance, record.name.prefix_hash, record.digest)


def manifest_key(key_prefix: str, namespace: bytes, prefix_hash: bytes) -> bytes:
    """Key of a block's manifest."""
    return key_prefix.encode() + b"m:" + namespace + prefix_hash


def children_key(parent_key: bytes) -> bytes:
    """Key of the sorted set of a block's children, from that of its manifest."""
    return parent_key + b"z"


def parsed_manifest(
    key: bytes, names: bytes, fields: dict[bytes, bytes], seal: Seal = MARKS
) -> tuple[Block, list[Entry]] | None:
    """A manifest as Redis gives it; None when it is absent or damaged, which makes it a miss.

    Args:
        key: its whole key.
        names: namespace and prefix hash of its block.
        fields: of the hash.
        seal: the form of its values.
    """
    values = {field: seal.unwrap(key, field, stored) for field, stored in fields.items()}
    return _unpack(names, {field: v for field, v in values.items() if v is not None})


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
        pipes: dict[int, Pipeline] = {}
        answers_at, parents = [], []
        for block, entry in entries:
            owner = self._servers.owner(block.prefix_hash)
            pipe = self._pipe(pipes, owner)
            self._add(pipe, block, entry)
            answers_at.append((owner, len(pipe) - 1))
            if entry.kind is Kind.KV:
                # A member says nothing without its manifest, wherever that is.
                pipe = self._pipe(pipes, self._servers.owner(block.parent_hash))
                siblings = children_key(self._key(block.namespace, block.parent_hash))
                pipe.zadd(siblings, {block.digests + block.prefix_hash: 0})
                pipe.pexpire(siblings, self._ttl_ms)
                parents.append((block.namespace, block.parent_hash))
        answers = {server: self._run(server, pipe.execute) for server, pipe in pipes.items()}
        self._tidy_now_and_then(parents)
        lives_ms = [0 if (a := answers[server]) is None else a[at] for server, at in answers_at]
        return [max(0, life_ms) / 1000 for life_ms in lives_ms]

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

    def _add(self, pipe: Pipeline, block: Block, entry: Entry) -> None:
        key = self._key(block.namespace, block.prefix_hash)
        fields = {"b": _pack_block(block), entry.field: _pack_entry(entry)}
        wrap = self._seal.wrap
        pipe.hset(key, mapping={f: wrap(key, f.encode(), v) for f, v in fields.items()})
        pipe.pexpire(key, self._ttl_ms, nx=True)
        pipe.pttl(key)

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

    def load(self, most: int = MOST_LOADED) -> list[tuple[Block, list[Entry]]]:
        """Every manifest that can be read, ordered so that a block comes after the one before it.

        Args:
            most: manifests of each server; the others are found when they are looked for.

        Raises:
            StoreUnavailable: no server can be read.
        """
        each = [
            self._run(server, partial(self._scan, client, most))
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

    def _scan(self, client: redis.Redis, most: int) -> list[tuple[Block, list[Entry]]]:
        found: list[tuple[Block, list[Entry]]] = []
        keys: list[bytes] = []
        for key in client.scan_iter(match=self._prefix + b"*", count=_SCAN_COUNT):
            if len(key) == len(self._prefix) + _NAMES_BYTES:  # others are sets of children
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
                logger.warning("Redis did not take or give manifests: %s", error)
            return None
        if self._changes(server, failing=False):
            logger.info("Redis takes and gives manifests again")
        return answer

    def _changes(self, server: int, *, failing: bool) -> bool:
        with self._lock:
            changed = (server in self._failing) != failing
            (self._failing.add if failing else self._failing.discard)(server)
        return changed


def _pack_block(block: Block) -> bytes:
    head = _BLOCK.pack(block.first_token, len(block.page_hashes), block.parent_hash)
    return head + b"".join(block.page_hashes) + block.digests


def _pack_entry(entry: Entry) -> bytes:
    packed = _ENTRY.pack(entry.size, entry.provenance)
    if entry.state_hash:
        return packed + _STATE.pack(entry.state_hash, entry.state_digest)
    return packed + entry.tail_figures


def _unpack(names: bytes, fields: dict[bytes, bytes]) -> tuple[Block, list[Entry]] | None:
    """A manifest read back; None when it is damaged, which makes it a miss."""
    try:
        first, pages, parent = _BLOCK.unpack_from(fields[b"b"])
        at = _BLOCK.size + 32 * pages
        hashes = tuple(fields[b"b"][i : i + 32] for i in range(_BLOCK.size, at, 32))
        block = Block(names[:32], names[32:], parent, first, fields[b"b"][at:], hashes)
        whole = len(block.digests) % DIGEST_BYTES == 0
        if len(names) != _NAMES_BYTES or pages > _MAX_PAGES or not whole:
            return None
        if pages != -(-len(block.digests) // _PAGE_BYTES):
            return None
        return block, [_entry(k, v) for k, v in fields.items() if k != b"b"]
    except (KeyError, ValueError, struct.error):
        return None


def _entry(field: bytes, value: bytes) -> Entry:
    if not _FIELD.fullmatch(field):
        raise ValueError(f"field {field!r}, wanted one of the module's table")
    size, provenance = _ENTRY.unpack_from(value)
    if not 0 < size <= _MAX_OBJECT_BYTES:
        raise ValueError(f"field {field!r} is of {size} bytes, wanted 1 to {_MAX_OBJECT_BYTES}")
    state, figures = (b"", b""), b""
    if field.startswith(b"c"):
        state = _STATE.unpack_from(value, _ENTRY.size)
        token, _, digest = field[1:].partition(b":")
        if not 0 < int(token) <= MAX_TOKENS or digest != state[1].hex().encode():
            raise ValueError(f"field {field!r} is no name of the checkpoint in it")
    elif field != b"k":
        figures = value[_ENTRY.size :]
        if len(figures) > MAX_TAIL_FIGURES_BYTES or len(figures) % TAIL_FIGURE_BYTES:
            raise ValueError(f"field {field!r} has {len(figures)} bytes of tail figures")
    return Entry(field.decode("ascii"), size, Provenance(provenance), *state, figures)
