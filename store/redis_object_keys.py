"""What LMCache's objects are called in Redis, and which object a name is of.

    <prefix><model>@<kv rank, 8 hex digits>@<object group, hex>@<chunk hash, hex>[@<cache salt>]

LMCache keeps `@` out of models and salts, so that each name is of one object.
"""

from __future__ import annotations

import re

from lmcache.v1.distributed.api import ObjectKey

_GLOB = re.compile(rb"([*?\[\]\\])")
_PARTS = re.compile(r"([^@]*)@([0-9a-f]{8})@([0-9a-f]+)@((?:[0-9a-f]{2})+)(?:@([^@]+))?")


def redis_key(prefix: str, key: ObjectKey) -> bytes:
    """Return an object's name in Redis."""
    name = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}"
    salt = f"@{key.cache_salt}" if key.cache_salt else ""
    return f"{prefix}{name}@{key.chunk_hash.hex()}{salt}".encode()


def object_key_of(prefix: str, name: bytes) -> ObjectKey | None:
    """Return the object that `redis_key` made a name for; None for what is none of its names."""
    try:
        found = _PARTS.fullmatch(name.decode().removeprefix(prefix))
        if found is None:
            return None
        model, rank, group, chunk_hash, salt = found.groups()
        key = ObjectKey(bytes.fromhex(chunk_hash), model, int(rank, 16), int(group, 16), salt or "")
    except ValueError:  # no UTF-8, or a salt that LMCache would not take
        return None
    return key if redis_key(prefix, key) == name else None


def pattern_of(prefix: str, model_name: str | None) -> bytes:
    """Return the glob pattern of the names of a model's objects, or of all."""
    start = prefix if model_name is None else f"{prefix}{model_name}@"
    return _GLOB.sub(rb"\\\1", start.encode()) + b"*"
