"""How stores of one Redis ask each other to erase, and say that they have.

Tables beside those of `ledger.py`:

    key                 field        value
    a:stores            store        empty
    a:erasures          erasure id   what is to be erased (`Erasure`)
    a:erased:<id>       store        what it has erased (`Erased`); `done` once nobody waits

A store lives as long as its key a:store:<id> does, which it writes again each second. An erasure is
kept for two days, so that a store that has not reached Redis for a while does not miss one: for as
long as its key a:erasure:<id> lives, and until another is asked for, or none was for two days. That
goes by Redis' clock alone; stores may be days apart.
"""

from __future__ import annotations

import secrets
import struct
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.eraser import Erased
from tailreplay.store.namespace import NAMESPACE_BYTES, TENANT_BYTES
from tailreplay.store.objects import Kind
from tailreplay.store.redis_entries import RedisEntries
from tailreplay.store.tier_bytes import tier_bytes

if TYPE_CHECKING:
    from tailreplay.store.redis_tables import RedisTables

_STORES = b"stores"
_ERASURES = b"erasures"
_DONE = b"done"
_LIFE_S = 2 * 24 * 3600
_ANSWER_LIFE_S = 3600
_ALIVE_MS = 5000
_ID_BYTES = 16
_CLEARS, _EVERYTHING = 1, 2
_HEAD = struct.Struct(f"<{TENANT_BYTES}s{NAMESPACE_BYTES}s")
_SIZE = struct.Struct("<I")


class Erasure(NamedTuple):
    """What is to be erased: a tenant's, or a block of the public scope and what goes on from it.

    Attributes:
        tenant: digest of the tenant; empty where a block or namespaces alone are given.
        namespaces: those known so far; of a block, the one that it is in.
        block: its name; empty where a tenant is given.
        clears: whether it is only to be forgotten: nothing is overwritten, and whose it was stays.
        everything: whether that is all there is.
    """

    tenant: bytes
    namespaces: frozenset[bytes]
    block: bytes = b""
    clears: bool = False
    everything: bool = False


class ErasureLedger:
    """Erasures in Redis, for one store. Thread-safe.

    Args:
        tables: where they are; its owner closes it.
        store_id: tells this store from others.

    All methods raise StoreUnavailable when Redis does not answer.
    """

    def __init__(self, tables: RedisTables, store_id: bytes) -> None:
        self._tables = tables
        self._store_id = store_id
        self._young = RedisEntries(tables, b"erasure", _LIFE_S)

    def live(self) -> None:
        """Says that this store lives."""
        key = self._alive_key(self._store_id)
        self._tables.run(lambda: self._tables.client.set(key, b"", px=_ALIVE_MS))
        self._tables.write(_STORES, {self._store_id: b""})

    def leave(self) -> None:
        """Says that it does no longer, and has nothing left to erase."""
        self._tables.delete(_STORES, [self._store_id])
        self._tables.run(lambda: self._tables.client.unlink(self._alive_key(self._store_id)))

    def others(self) -> set[bytes]:
        """The other stores that live; those that do not are forgotten."""
        known = self._tables.all(_STORES).keys() - {self._store_id}
        alive = {store for store in known if self._is_alive(store)}
        self._tables.delete(_STORES, known - alive)
        return alive

    def ask(self, erasure_id: bytes, erasure: Erasure) -> None:
        """Asks all stores."""
        body = _HEAD.pack(erasure.tenant, erasure.block) + b"".join(erasure.namespaces)
        if erasure.clears:
            body += bytes([_CLEARS | _EVERYTHING * erasure.everything])
        self._forget_old()
        self._young.write({erasure_id: b""})  # first, or it might be forgotten as an old one
        self._tables.write(_ERASURES, {erasure_id: body}, _LIFE_S)

    def asked(self) -> dict[bytes, Erasure]:
        """What was asked for lately, by id."""
        found = self._tables.all(_ERASURES).items()
        return {i: _erasure(body) for i, body in found if len(body) >= _HEAD.size}

    def answer(self, erasure_id: bytes, done: Erased) -> bool:
        """Says what this store has erased; returns whether anybody has waited for it."""
        table = _answers(erasure_id)
        if _DONE in self._tables.all(table):
            return False
        self._tables.write(table, {self._store_id: _packed(done)}, _ANSWER_LIFE_S)
        return _DONE not in self._tables.all(table)

    def answers(self, erasure_id: bytes) -> dict[bytes, Erased]:
        """What stores have answered."""
        found = self._tables.all(_answers(erasure_id))
        return {store: _unpacked(body) for store, body in found.items() if store != _DONE}

    def close(self, erasure_id: bytes) -> None:
        """Says that nobody waits for answers any more: who comes late deletes in Redis itself."""
        self._tables.write(_answers(erasure_id), {_DONE: b""}, _LIFE_S)

    def _is_alive(self, store: bytes) -> bool:
        return bool(self._tables.run(lambda: self._tables.client.exists(self._alive_key(store))))

    def _alive_key(self, store: bytes) -> bytes:
        return self._tables.key(b"store:" + store)

    def _forget_old(self) -> None:
        known = self._tables.all(_ERASURES).keys()
        self._tables.delete(_ERASURES, known - self._young.read(known).keys())


def new_erasure_id() -> bytes:
    """Under which stores answer; 16 bytes."""
    return secrets.token_bytes(_ID_BYTES)


def names_in(body: bytes) -> frozenset[bytes]:
    """Namespaces that stand back to back."""
    ends = range(0, len(body) - NAMESPACE_BYTES + 1, NAMESPACE_BYTES)
    return frozenset(body[at : at + NAMESPACE_BYTES] for at in ends)


def _answers(erasure_id: bytes) -> bytes:
    return b"erased:" + erasure_id


def _erasure(body: bytes) -> Erasure:
    tenant, block = _HEAD.unpack_from(body)
    flags = body[-1] if (len(body) - _HEAD.size) % NAMESPACE_BYTES else 0
    return Erasure(
        tenant if any(tenant) and not any(block) else b"",
        names_in(body[_HEAD.size :]),
        block if any(block) else b"",
        bool(flags & _CLEARS),
        bool(flags & _EVERYTHING),
    )


def _packed(done: Erased) -> bytes:
    # What was in Redis is counted by the store that deletes it there.
    in_cpu = [one for one in tier_bytes(done.removed) if one.tier == pb.TIER_CPU]
    counts = pb.EraseResponse(
        removed=in_cpu,
        overwritten_bytes=done.overwritten_bytes,
        held_objects=done.held,
        cpu_objects_left=done.left_in_cpu,
        bulk_files_deleted=done.bulk_files,
        bulk_files_left=done.left_in_bulk,
        unlisted_bulk_tiers=done.unlisted,
    ).SerializeToString()
    return _SIZE.pack(len(counts)) + counts + b"".join(done.namespaces)


def _unpacked(body: bytes) -> Erased:
    (size,) = _SIZE.unpack_from(body)
    counts = pb.EraseResponse.FromString(body[_SIZE.size : _SIZE.size + size])
    done = Erased(
        overwritten_bytes=counts.overwritten_bytes,
        held=counts.held_objects,
        left_in_cpu=counts.cpu_objects_left,
        bulk_files=counts.bulk_files_deleted,
        left_in_bulk=counts.bulk_files_left,
        unlisted=counts.unlisted_bulk_tiers,
        namespaces=set(names_in(body[_SIZE.size + size :])),
    )
    for one in counts.removed:
        done.removed["cpu", Kind(one.kind), "objects"] += one.objects
        done.removed["cpu", Kind(one.kind), "bytes"] += one.bytes
    return done
