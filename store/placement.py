"""Which of several Redis servers has what: rendezvous hashing.

Everybody who knows the same servers picks the same one, and a server that leaves or comes takes
only its own share along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def owner(places: Sequence[str], digest: bytes) -> int:
    """Return the number of the server that has what is called `digest`.

    Args:
        places: `RedisEndpoint.place` of each server, in any order, at least one.
        digest: for an object or a block, the hash of its prefix.
    """
    if len(places) == 1:
        return 0
    return max(range(len(places)), key=lambda i: _weight(places[i], digest))


def _weight(place: str, digest: bytes) -> bytes:
    return hashlib.blake2b(place.encode() + b"\0" + digest, digest_size=16).digest()
