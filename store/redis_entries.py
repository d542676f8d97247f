"""Metadata in Redis of which each entry ends by itself, by Redis' clock and nobody else's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tailreplay.store.batches import batches
from tailreplay.store.manifest_form import literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tailreplay.store.redis_tables import RedisTables

_BATCH = 1000


class RedisEntries:
    """Reads and writes entries of one kind, each a string of its own. Thread-safe.

    Args:
        tables: beside which they are; its owner closes it.
        kind: with which their keys begin, `a:<kind>:<name>`.
        life_s: how long an entry lives from when it was last written.

    All methods raise StoreUnavailable when Redis does not answer.
    """

    def __init__(self, tables: RedisTables, kind: bytes, life_s: float) -> None:
        self._tables = tables
        self._kind = kind
        self._life_ms = int(life_s * 1000)

    def write(self, values: Mapping[bytes, bytes]) -> None:
        """Writes entries by name."""
        for names in batches([*values], _BATCH):
            pipe = self._tables.client.pipeline(transaction=False)
            for name in names:
                sealed = self._tables.sealed(self._table(name), name, values[name])
                pipe.set(self._tables.key(self._table(name)), sealed, px=self._life_ms)
            self._tables.run(pipe.execute)

    def read(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of them that there are; damaged ones are left out."""
        found = {}
        for batch in batches([*names], _BATCH):
            pipe = self._tables.client.pipeline(transaction=False)
            for name in batch:
                pipe.get(self._tables.key(self._table(name)))
            for name, sealed in zip(batch, self._tables.run(pipe.execute), strict=True):
                value = self._unsealed(name, sealed)
                if value is not None:
                    found[name] = value
        return found

    def all(self) -> dict[bytes, bytes]:
        """Every entry, by name; scans all of one server."""
        start = self._tables.key(self._table(b""))
        client, pattern = self._tables.client, literal(start) + b"*"
        keys: list[Any] = self._tables.run(
            lambda: list(client.scan_iter(match=pattern, count=_BATCH))
        )
        return self.read({key[len(start) :] for key in keys})

    def delete(self, names: Iterable[bytes]) -> None:
        """Takes entries away."""
        for batch in batches([*names], _BATCH):
            keys = [self._tables.key(self._table(name)) for name in batch]
            self._tables.run(partial(self._tables.client.unlink, *keys))

    def _table(self, name: bytes) -> bytes:
        return self._kind + b":" + name

    def _unsealed(self, name: bytes, sealed: bytes | None) -> bytes | None:
        return None if sealed is None else self._tables.unsealed(self._table(name), name, sealed)
