"""Tells when a Redis server may lack what it should have: flushed, or away meanwhile.

Each server has a random epoch, under a key that does not expire; whichever store finds none sets
one, and a server that has lost everything has lost that too. One that was away may have come back
with less than it had, so that counts as well.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import redis

if TYPE_CHECKING:
    from tailreplay.store.redis_servers import RedisServers

_EPOCH_BYTES = 16


class RedisEpochs:
    """Epochs of servers, as one store has seen them. For one thread.

    Args:
        servers: which; closed with this.
        key_prefix: in front of every key.
    """

    def __init__(self, servers: RedisServers, key_prefix: str) -> None:
        self._servers = servers
        self._key = epoch_key(key_prefix)
        self._seen: list[bytes] = [b""] * len(servers.clients)
        self._away: set[int] = set()
        # One connection each, whose end is seen: a pool's would be made anew without a word.
        self._clients: dict[int, redis.Redis] = {}

    def lost(self) -> set[int]:
        """Numbers of the servers that may lack something that they have had, or should have got."""
        return {number for number in range(len(self._seen)) if self._has_lost(number)}

    def server_of(self, digest: bytes) -> int:
        """Number of the server that has what is placed by `digest`."""
        return self._servers.owner(digest)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._servers.close()

    def _has_lost(self, number: int) -> bool:
        try:
            if number not in self._clients:
                self._clients[number] = self._servers.clients[number].client()  # type: ignore[no-untyped-call]
            epoch = self._epoch(self._clients[number])
        except redis.RedisError:
            if client := self._clients.pop(number, None):
                client.close()
            self._away.add(number)
            return False
        before, self._seen[number] = self._seen[number], epoch
        was_away = number in self._away
        self._away.discard(number)
        return was_away or before not in (b"", epoch)

    def _epoch(self, client: redis.Redis) -> bytes:
        found: Any = client.get(self._key)
        if not found:
            client.set(self._key, secrets.token_bytes(_EPOCH_BYTES), nx=True)
            found = client.get(self._key)
        return bytes(found or b"")


def epoch_key(key_prefix: str) -> str:
    """Key of a server's epoch, the same on each of them."""
    return f"{key_prefix}epoch"
