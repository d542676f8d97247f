"""What operators decided, and whose namespaces are whose, kept in Redis over a restart.

Stores that share a Redis share it; of several servers one has it. Hashes, each value sealed like a
manifest's:

    key             field       value
    a:limits        tenant      limit in the CPU tier, limit in Redis, bytes; all ones = none
    a:modes         tenant      mode
    a:public        prefix      namespace, when it was made public, s since the epoch
                    hash

and strings, sealed likewise:

    key                     value
    a:owner:<namespace>     tenant digest, 16 bytes
    a:name:<namespace>      what clients call it, 40 bytes, masked
    a:public:<prefix hash>  what a public prefix consists of: names of its blocks, 32 bytes each

Owners and names live three days by Redis' clock, longer than a payload that nobody asks for, and
are written anew each day while there is something of theirs. Nobody's time of day says where they
are, so a store finds them whose clock was stepped, or is days off another's. No tenants' names and
no salts are in it, and no tokens; what clients call a namespace is masked, since who knows it can
test guesses of whole prefixes by their names.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from tailreplay.store.batches import batches
from tailreplay.store.manifest_form import literal
from tailreplay.store.manifest_sweep import sweep
from tailreplay.store.namespace import NAMESPACE_BYTES, TENANT_BYTES
from tailreplay.store.public_prefixes import PublicPrefix
from tailreplay.store.quota import NO_LIMITS, Limits
from tailreplay.store.redis_entries import RedisEntries

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tailreplay.store.redis_tables import RedisTables

logger = logging.getLogger(__name__)

_LIMITS = struct.Struct("<QQ")
_NONE = (1 << 64) - 1
_SCAN_COUNT = 1000
WRITTEN_EVERY_S = 24 * 3600.0
"""After which owners and names are written anew."""

_LIFE_S = 3 * WRITTEN_EVERY_S
_CHECK_BYTES = 8
_MASK_CONTEXT = "tailreplay client name mask v1"
_FEW = 8
"""Namespaces for each of which Redis is scanned by itself; more are looked for in one scan."""
_PUBLIC = b"public"
_PUBLISHED = struct.Struct("<32sd")


class Decisions(NamedTuple):
    """What operators have decided, as Redis has it.

    Attributes:
        limits: by tenant.
        modes: by tenant.
        epoch: of the server that has them; another one than before, or none, if it has lost them.
    """

    limits: dict[bytes, Limits]
    modes: dict[bytes, str]
    epoch: bytes


class Ledger:
    """Reads and writes operators' decisions. Thread-safe; every call is bounded by the timeout.

    Args:
        tables: where they are.
        secret: that of the running digests; who does not have it can not read names.

    All methods raise StoreUnavailable when Redis does not answer.
    """

    def __init__(self, tables: RedisTables, secret: bytes = b"") -> None:
        self._tables = tables
        self._owners = RedisEntries(tables, b"owner", _LIFE_S)
        self._names = RedisEntries(tables, b"name", _LIFE_S)
        self._secret = secret

    def owners_of(self, namespaces: Iterable[bytes]) -> dict[bytes, bytes]:
        """Tenants of those namespaces that have one."""
        found = self._owners.read(namespaces)
        return {space: tenant for space, tenant in found.items() if len(tenant) == TENANT_BYTES}

    def names_of(self, namespaces: Iterable[bytes]) -> dict[bytes, bytes]:
        """What clients call namespaces, as far as anybody has said so."""
        found = self._names.read(namespaces).items()
        size = NAMESPACE_BYTES + _CHECK_BYTES
        names = {space: self._masked(space, said) for space, said in found if len(said) == size}
        return {s: n[:NAMESPACE_BYTES] for s, n in names.items() if n == _checked(n)}

    def name(self, names: Mapping[bytes, bytes]) -> None:
        """Writes what clients call namespaces."""
        self._names.write({s: self._masked(s, _checked(name)) for s, name in names.items()})

    def _masked(self, namespace: bytes, name: bytes) -> bytes:
        """A name that only those can read who have the secret; and back again."""
        hasher = blake3(self._secret + namespace, derive_key_context=_MASK_CONTEXT)
        return bytes(a ^ b for a, b in zip(name, hasher.digest(len(name)), strict=True))

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """All namespaces of a tenant; scans all of one server."""
        found = self._owners.all().items()
        return {s for s, owner in found if owner == tenant and len(s) == NAMESPACE_BYTES}

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Writes tenants by namespace."""
        self._owners.write(owners)

    def disown(self, namespaces: Iterable[bytes]) -> None:
        """Takes namespaces out, which belong to nobody then."""
        self._owners.delete(namespaces)

    def decisions(self) -> Decisions:
        """All limits and modes."""
        limits, modes = self.limits(), self.modes()
        # Last, or they could have been lost between.
        found: Any = self._tables.run(lambda: self._tables.client.get(self._tables.epoch_key))
        return Decisions(limits, modes, found or b"")

    def limits(self) -> dict[bytes, Limits]:
        """Limits by tenant."""
        found = {}
        for tenant, value in self._tables.all(b"limits").items():
            if len(value) == _LIMITS.size:
                cpu, in_redis = _LIMITS.unpack(value)
                found[tenant] = Limits(
                    None if cpu == _NONE else cpu, None if in_redis == _NONE else in_redis
                )
        return found

    def set_limits(self, tenant: bytes, limits: Limits) -> None:
        """Writes a tenant's limits."""
        if limits == NO_LIMITS:
            self._tables.delete(b"limits", [tenant])
            return
        cpu, in_redis = (_NONE if n is None else n for n in (limits.cpu_bytes, limits.redis_bytes))
        self._tables.write(b"limits", {tenant: _LIMITS.pack(cpu, in_redis)})

    def modes(self) -> dict[bytes, str]:
        """Modes by tenant."""
        return {
            t: value.decode("ascii", "replace") for t, value in self._tables.all(b"modes").items()
        }

    def set_mode(self, tenant: bytes, mode: str) -> None:
        """Writes a tenant's mode; empty takes it away."""
        if mode:
            self._tables.write(b"modes", {tenant: mode.encode()})
        else:
            self._tables.delete(b"modes", [tenant])

    def published(self, known: Mapping[bytes, PublicPrefix]) -> dict[bytes, PublicPrefix]:
        """Every public prefix by its name.

        Args:
            known: what is not read again, by name.
        """
        found = {}
        for name, value in self._tables.all(_PUBLIC).items():
            prefix = known.get(name) or self._published(name, value)
            if prefix is not None:
                found[name] = prefix
        return found

    def publish(self, prefix: PublicPrefix) -> None:
        """Writes a public prefix."""
        name = prefix.prefix_hash
        table = _blocks_of(name)
        blocks = self._tables.sealed(table, name, b"".join(prefix.blocks))
        self._tables.run(lambda: self._tables.client.set(self._tables.key(table), blocks))
        self._tables.write(_PUBLIC, {name: _PUBLISHED.pack(prefix.namespace, prefix.added_at_s)})

    def unpublish(self, prefix_hash: bytes) -> None:
        """Takes a public prefix out."""
        self._tables.delete(_PUBLIC, [prefix_hash])
        self._tables.run(
            lambda: self._tables.client.unlink(self._tables.key(_blocks_of(prefix_hash)))
        )

    def keys_of(
        self, namespaces: Collection[bytes] | None, names: Collection[bytes] | None = None
    ) -> list[bytes]:
        """Every key that has payload or a manifest of namespaces; scans all of Redis.

        Args:
            namespaces: whose; None = anybody's.
            names: of prefixes, if only their keys are wanted.
        """
        manifests, payloads = self._tables.prefix + b"m:", self._tables.prefix + b"o:"
        spaces = {space: space.hex().encode() for space in namespaces or ()}
        hexes = set(spaces.values())
        in_hex = {name.hex().encode() for name in names or ()}
        few = spaces if namespaces is not None and len(spaces) <= _FEW else {b"": b""}
        patterns = [literal(manifests + space) + b"*" for space in few]
        patterns += [literal(payloads + space) + b"*" for space in few.values()]

        def is_wanted(key: bytes) -> bool:
            if namespaces is None:
                return True
            if key.startswith(manifests):
                space, name = _halves(key[len(manifests) :])
                return space in spaces and (names is None or name in names)
            words = key[len(payloads) :].split(b"@")
            is_named = names is None or not in_hex.isdisjoint(words)
            return words[0].partition(b"|")[0] in hexes and is_named

        return self._tables.run(
            lambda: [
                key
                for client in self._tables.servers.clients
                for pattern in patterns
                for key in client.scan_iter(match=pattern, count=_SCAN_COUNT)
                if is_wanted(key)
            ]
        )

    def delete(self, keys: list[bytes]) -> int:
        """Deletes keys; returns how many were there."""
        parts = list(batches(keys, _SCAN_COUNT))
        clients = self._tables.servers.clients
        return self._tables.run(
            lambda: sum(int(c.unlink(*part)) for c in clients for part in parts)
        )

    def sweep(self, namespaces: Collection[bytes] | None) -> int:
        """Deletes what manifests hold of blocks without objects; scans all of Redis.

        Args:
            namespaces: whose; None = anybody's.

        Returns:
            How many manifests it has deleted.
        """
        manifests = self._tables.prefix + b"m:"
        keys = [key for key in self.keys_of(namespaces) if key.startswith(manifests)]
        clients = self._tables.servers.clients
        return self._tables.run(lambda: sweep(clients, keys, len(manifests)))

    def _published(self, name: bytes, value: bytes) -> PublicPrefix | None:
        """A public prefix as it was written; None if it is damaged."""
        table = _blocks_of(name)
        sealed: Any = self._tables.run(lambda: self._tables.client.get(self._tables.key(table)))
        names = self._tables.unsealed(table, name, sealed) if sealed is not None else None
        if len(value) != _PUBLISHED.size or not names or len(names) % len(name):
            logger.warning("a damaged public prefix is left out")
            return None
        space, added_at_s = _PUBLISHED.unpack(value)
        blocks = [names[at : at + len(name)] for at in range(0, len(names), len(name))]
        return PublicPrefix(space, tuple(blocks), added_at_s) if blocks[-1] == name else None


def _checked(name: bytes) -> bytes:
    """A name, and by what it is told from another secret's."""
    name = name[:NAMESPACE_BYTES]
    return name + blake3(name).digest(_CHECK_BYTES)


def _halves(names: bytes) -> tuple[bytes, bytes]:
    """Namespace and prefix hash with which a manifest's key ends."""
    return names[:NAMESPACE_BYTES], names[NAMESPACE_BYTES : 2 * NAMESPACE_BYTES]


def _blocks_of(prefix_hash: bytes) -> bytes:
    return _PUBLIC + b":" + prefix_hash
