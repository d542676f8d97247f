"""Takes out of Redis what manifests hold of blocks without objects.

An object that goes takes its field of a manifest along, and leaves what says which block that is,
and the block among its parent's children. Nobody finds anything by them, and they expire; what is
cleared is to leave none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailreplay.store.batches import batches
from tailreplay.store.manifest_form import BLOCK_FIELD, NAME_BYTES, NAMES_BYTES
from tailreplay.store.namespace import NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

_MOST = 1000
"""Keys, or members of a set, that are looked at in one round trip."""


def sweep(clients: Sequence[redis.Redis], keys: Sequence[bytes], prefix_bytes: int) -> int:
    """Deletes manifests that name no object, and children that have no manifest.

    What is written to one between the look and the deletion goes with it: a miss.

    Args:
        clients: of all servers.
        keys: of manifests and of sets of children.
        prefix_bytes: bytes of each key in front of its namespace.

    Returns:
        How many manifests are deleted.

    Raises:
        redis.RedisError: a server does not answer.
    """
    whole = prefix_bytes + NAMES_BYTES
    manifests = [key for key in keys if len(key) == whole]
    swept = sum(_sweep_manifests(client, manifests) for client in clients)
    for key in {key for key in keys if len(key) > whole}:
        for client in clients:
            _sweep_children(client, key, key[: prefix_bytes + NAMESPACE_BYTES], clients)
    return swept


def _sweep_manifests(client: redis.Redis, keys: Sequence[bytes]) -> int:
    swept = 0
    for some in batches(keys, _MOST):
        pipe = client.pipeline(transaction=False)
        for key in some:
            pipe.hgetall(key)
        # An answer may be an error: the key is of another type.
        found = zip(some, pipe.execute(raise_on_error=False), strict=True)
        empty = [key for key, fields in found if fields and set(fields) == {BLOCK_FIELD}]
        swept += int(client.unlink(*empty)) if empty else 0
    return swept


def _sweep_children(
    client: redis.Redis, key: bytes, space: bytes, clients: Sequence[redis.Redis]
) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.zrangebylex(key, "-", "+")
    (members,) = pipe.execute(raise_on_error=False)
    if not isinstance(members, list):
        return  # an error: the key is of another type
    for some in batches(members, _MOST):
        names = [space + member[-NAME_BYTES:] for member in some]
        there = zip(*(_exist(one, names) for one in clients), strict=True)
        gone = [member for member, known in zip(some, there, strict=True) if not any(known)]
        if gone:
            client.zrem(key, *gone)


def _exist(client: redis.Redis, keys: Sequence[bytes]) -> list[Any]:
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.exists(key)
    return pipe.execute()
