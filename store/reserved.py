"""What a `put` comes to: room in the pool, or why there is none."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj


class PutOutcome(enum.Enum):
    """What became of a `put`."""

    STORED = enum.auto()
    EXISTS = enum.auto()
    """Already there, or being written by another `put`."""
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
