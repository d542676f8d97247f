"""Small tables of metadata in Redis: hashes whose values are sealed, on one of its servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.redis_epochs import epoch_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tailreplay.store.manifest_seal import Seal
    from tailreplay.store.redis_servers import RedisServers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PLACED_BY = b"a:"
"""What says which of several servers has the tables."""


class RedisTables:
    """Reads and writes tables by name. Thread-safe; every call is bounded by the timeout.

    Args:
        servers: those that have the manifests; closed with this.
        key_prefix: in front of every key.
        seal: the form of values.

    All methods raise StoreUnavailable when Redis does not answer.

    Attributes:
        servers: as given.
        prefix: as given.
        client: of the server that has the tables.
        epoch_key: of that server's epoch.
    """

    def __init__(self, servers: RedisServers, key_prefix: str, seal: Seal = MARKS) -> None:
        self.servers = servers
        self.prefix = key_prefix.encode()
        self.client = servers.clients[servers.owner(_PLACED_BY)]
        self._seal = seal
        self.epoch_key = epoch_key(key_prefix)

    def key(self, table: bytes) -> bytes:
        """A table's key."""
        return self.prefix + b"a:" + table

    def all(self, table: bytes) -> dict[bytes, bytes]:
        """Every field; damaged ones are left out."""
        key = self.key(table)
        fields: dict[Any, Any] = self.run(lambda: self.client.hgetall(key))
        found = {}
        for field, value in fields.items():
            body = self.unsealed(table, field, value)
            if body is not None:
                found[field] = body
            else:
                logger.warning("a damaged entry of %s is left out", key.decode(errors="replace"))
        return found

    def write(self, table: bytes, values: Mapping[bytes, bytes], life_s: float = 0) -> None:
        """Writes fields.

        Args:
            table: its name.
            values: by field.
            life_s: how long the table lives from now on; 0 = as it did.
        """
        sealed: dict[Any, Any] = {f: self.sealed(table, f, value) for f, value in values.items()}
        if not sealed:
            return
        key = self.key(table)
        self.run(lambda: self.client.hset(key, mapping=sealed))
        if life_s:
            self.run(lambda: self.client.pexpire(key, int(life_s * 1000)))

    def delete(self, table: bytes, fields: Iterable[bytes]) -> None:
        """Takes fields away."""
        names = list(fields)
        if names:
            self.run(lambda: self.client.hdel(self.key(table), *names))

    def sealed(self, table: bytes, field: bytes, value: bytes) -> bytes:
        """A value in the form that it has in Redis."""
        return self._seal.wrap(self.key(table), field, value)

    def unsealed(self, table: bytes, field: bytes, value: bytes) -> bytes | None:
        """A value read back; None if it is damaged."""
        return self._seal.unwrap(self.key(table), field, value)

    def run(self, call: Callable[[], T]) -> T:
        """What a call to Redis returns."""
        try:
            return call()
        except redis.RedisError as error:
            raise StoreUnavailable(
                f"Redis did not take or give operators' data: {error}"
            ) from error

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()
