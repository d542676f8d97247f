"""Objects that tell their own bytes, put into tiers and pinned."""

import hashlib
import queue
from collections.abc import Callable

from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.pins import Pinned
from tailreplay.store.reserved import PutOutcome
from tailreplay.store.tiers import Tiers

MIB = 1 << 20
NAMESPACE = bytes(range(32))


def name_of(i: int, kind: Kind = Kind.KV) -> ObjectName:
    return ObjectName(NAMESPACE, kind, hashlib.sha256(b"%d" % i).digest())


def payload_of(name: ObjectName, size: int) -> bytes:
    """Bytes that tell which object they belong to at every 33-byte step."""
    unit = bytes([name.kind]) + name.prefix_hash
    return (unit * (size // len(unit) + 1))[:size]


def put(tiers: Tiers, name: ObjectName, size: int) -> PutOutcome:
    def fill(memory: memoryview) -> None:
        memory[:] = payload_of(name, size)

    return tiers.put(name, size, fill)


def pin(
    tiers: Tiers, *wanted: tuple[ObjectName, int], timeout_s: float = 20
) -> list[Pinned | Miss]:
    pins = tiers.pin(wanted, urgent=True, timeout_s=timeout_s)
    for (name, size), pinned in zip(wanted, pins, strict=True):
        assert isinstance(pinned, Miss) or pinned.data == payload_of(name, size)
    return pins


OpenTiers = Callable[..., Tiers]
Outcomes = queue.Queue[tuple[str, ObjectName]]
