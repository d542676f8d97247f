"""Objects that tell their own bytes, put into tiers and pinned."""

import hashlib
import queue
from collections.abc import Callable

from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned
from tailreplay.store.reserved import NoRoom
from tailreplay.store.tiers import Tiers

MIB = 1 << 20
NAMESPACE = bytes(range(32))


def name_of(i: int, kind: Kind = Kind.KV) -> ObjectName:
    return ObjectName(NAMESPACE, kind, hashlib.sha256(b"%d" % i).digest())


def payload_of(name: ObjectName, size: int) -> bytes:
    """Bytes that tell which object they belong to at every 33-byte step."""
    unit = bytes([name.kind]) + name.prefix_hash
    return (unit * (size // len(unit) + 1))[:size]


def put(tiers: Tiers, name: ObjectName, size: int) -> NoRoom | None:
    return put_bytes(tiers, name, payload_of(name, size))


def put_bytes(tiers: Tiers, name: ObjectName, data: bytes) -> NoRoom | None:
    """Stores an object in the CPU tier, and tells why not."""
    (place,) = tiers.reserve([name], len(data))
    if isinstance(place, NoRoom):
        return place
    place.data[:] = data
    tiers.commit([place])
    return None


def pin(
    tiers: Tiers, *wanted: tuple[ObjectName, int], timeout_s: float = 20
) -> list[Pinned | Miss]:
    pins = tiers.pin(wanted, urgent=True, timeout_s=timeout_s)
    for (name, size), pinned in zip(wanted, pins, strict=True):
        assert isinstance(pinned, Miss) or pinned.data == payload_of(name, size)
    return pins


OpenTiers = Callable[..., Tiers]
Outcomes = queue.Queue[tuple[str, ObjectName]]
