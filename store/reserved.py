"""Room in the pool for what is stored, or why there is none."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.memory_management import MemoryObj

from tailreplay.store.lmcache_l1 import bytes_of


class NoRoom(enum.Enum):
    """Why an object gets no room."""

    EXISTS = enum.auto()
    """Already there, or being written by another."""
    FULL = enum.auto()
    """No contiguous room in the pool: evict and try again."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room in the pool for one object that is being stored.

    Attributes:
        data: to be filled; it still holds the bytes of an earlier object.
    """

    key: ObjectKey
    size: int
    memory: MemoryObj
    data: memoryview


def room_for(
    key: ObjectKey, size: int, error: L1Error, memory: MemoryObj | None
) -> Reserved | NoRoom:
    """Return the room that the pool has given, or why it has given none.

    Args:
        key: whose.
        size: bytes asked for.
        error: the pool's; of no interest where it has given memory.
        memory: what it has given.
    """
    if memory is not None:
        return Reserved(key, size, memory, bytes_of(memory))
    return NoRoom.FULL if error is L1Error.OUT_OF_MEMORY else NoRoom.EXISTS
