"""What operators decided, and whose namespaces are whose, kept in Redis over a restart.

Stores that share a Redis share it; of several servers one has it. Hashes, each value sealed like a
manifest's:

    key             field       value
    a:owners:<day>  namespace   tenant digest, 16 bytes
    a:names:<day>   namespace   what clients call it, 40 bytes, masked
    a:limits        tenant      limit in the CPU tier, limit in Redis, bytes; all ones = none
    a:modes         tenant      mode
    a:public        prefix      namespace, when it was made public, s since the epoch
                    hash

What a public prefix consists of is in a string beside that, a:public:<prefix hash>: names of its
blocks, 32 bytes each, sealed likewise.

Owners and names are written anew each day (since the epoch, by stores' clocks) while there is
something of theirs, and a day's hash lives three: longer than any payload that nobody asks for. No
tenants' names and no salts are in it, and no tokens; what clients call a namespace is masked, since
who knows it can test guesses of whole prefixes by their names.
"""

from __future__ import annotations

import logging
import struct
import time
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from tailreplay.store.manifest_form import literal
from tailreplay.store.manifest_sweep import sweep
from tailreplay.store.namespace import NAMESPACE_BYTES, TENANT_BYTES
from tailreplay.store.public_prefixes import PublicPrefix
from tailreplay.store.quota import NO_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tailreplay.store.redis_tables import RedisTables

logger = logging.getLogger(__name__)

_LIMITS = struct.Struct("<QQ")
_NONE = (1 << 64) - 1
_SCAN_COUNT = 1000
_DAY_S = 24 * 3600
_OWNER_DAYS = 3
_CHECK_BYTES = 8
_MASK_CONTEXT = "tailreplay client name mask v1"
_FEW = 8
"""Namespaces for each of which Redis is scanned by itself; more are looked for in one scan."""
_PUBLIC = b"public"
_PUBLISHED = struct.Struct("<32sd")


class Ledger:
    """Reads and writes operators' decisions. Thread-safe; every call is bounded by the timeout.

    Args:
        tables: where they are.
        wall: seconds since the epoch.
        secret: that of the running digests; who does not have it can not read names.

    All methods raise StoreUnavailable when Redis does not answer.
    """

    def __init__(
        self, tables: RedisTables, wall: Callable[[], float] = time.time, secret: bytes = b""
    ) -> None:
        self._tables = tables
        self._wall = wall
        self._secret = secret

    @property
    def day(self) -> int:
        """Which day's owners are written now."""
        return int(self._wall() // _DAY_S)

    def owners_of(self, namespaces: Sequence[bytes]) -> dict[bytes, bytes]:
        """Tenants of those namespaces that have one."""
        return self._looked_up(self._owner_tables(), namespaces, TENANT_BYTES)

    def names_of(self, namespaces: Sequence[bytes]) -> dict[bytes, bytes]:
        """What clients call namespaces, as far as anybody has said so."""
        size = NAMESPACE_BYTES + _CHECK_BYTES
        found = self._looked_up(self._by_day(b"names"), namespaces, size)
        names = {space: self._masked(space, said) for space, said in found.items()}
        return {s: n[:NAMESPACE_BYTES] for s, n in names.items() if n == _checked(n)}

    def name(self, names: Mapping[bytes, bytes]) -> None:
        """Writes what clients call namespaces, for today."""
        masked = {space: self._masked(space, _checked(name)) for space, name in names.items()}
        self._tables.write(self._by_day(b"names")[0], masked, _OWNER_DAYS * _DAY_S)

    def _masked(self, namespace: bytes, name: bytes) -> bytes:
        """A name that only those can read who have the secret; and back again."""
        hasher = blake3(self._secret + namespace, derive_key_context=_MASK_CONTEXT)
        return bytes(a ^ b for a, b in zip(name, hasher.digest(len(name)), strict=True))

    def _looked_up(
        self, tables: Sequence[bytes], namespaces: Sequence[bytes], size: int
    ) -> dict[bytes, bytes]:
        """The latest values of namespaces in tables by day, those of a size."""
        pipe = self._tables.client.pipeline(transaction=False)
        for table in tables:
            for space in namespaces:
                pipe.hget(self._tables.key(table), space)
        answers = iter(self._tables.run(pipe.execute))
        found: dict[bytes, bytes] = {}
        for table in tables:
            for space, value in zip(namespaces, answers, strict=False):
                tenant = self._tables.unsealed(table, space, value) if value is not None else None
                if tenant is not None and len(tenant) == size:
                    found.setdefault(space, tenant)
        return found

    def namespaces_of(self, tenant: bytes) -> set[bytes]:
        """All namespaces of a tenant."""
        return {
            space
            for table in self._owner_tables()
            for space, owner in self._tables.all(table).items()
            if owner == tenant and len(space) == NAMESPACE_BYTES
        }

    def own(self, owners: Mapping[bytes, bytes]) -> None:
        """Writes tenants by namespace, for today."""
        table = self._owner_tables()[0]
        if owners:
            self._tables.write(table, owners, _OWNER_DAYS * _DAY_S)

    def disown(self, namespaces: Iterable[bytes]) -> None:
        """Takes namespaces out, which belong to nobody then."""
        spaces = list(namespaces)
        for table in self._owner_tables():
            self._tables.delete(table, spaces)

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
        parts = [keys[at : at + _SCAN_COUNT] for at in range(0, len(keys), _SCAN_COUNT)]
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

    def _owner_tables(self) -> list[bytes]:
        return self._by_day(b"owners")

    def _by_day(self, what: bytes) -> list[bytes]:
        """Tables of the days that are read, today's first."""
        return [b"%s:%d" % (what, self.day - ago) for ago in range(_OWNER_DAYS)]


def _checked(name: bytes) -> bytes:
    """A name, and by what it is told from another secret's."""
    name = name[:NAMESPACE_BYTES]
    return name + blake3(name).digest(_CHECK_BYTES)


def _halves(names: bytes) -> tuple[bytes, bytes]:
    """Namespace and prefix hash with which a manifest's key ends."""
    return names[:NAMESPACE_BYTES], names[NAMESPACE_BYTES : 2 * NAMESPACE_BYTES]


def _blocks_of(prefix_hash: bytes) -> bytes:
    return _PUBLIC + b":" + prefix_hash
