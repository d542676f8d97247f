"""How a request to Redis is cut into loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tailreplay.store.shm_pool import ALIGN_BYTES

SLICE_BYTES = 8 << 20
"""Most that one load asks for, so that what is urgent waits for no more than that."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Slice(Generic[K]):
    """Objects of one size, to be loaded together.

    Attributes:
        keys: the objects, at least one.
        size: bytes of each.
    """

    keys: list[K]
    size: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of the pool that each takes."""
        return -(-self.size // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that all take."""
        return len(self.keys) * self.stride_bytes

    def split(self, at: int) -> tuple[Slice[K], list[Slice[K]]]:
        """Return the first `at` objects, and the rest, if any."""
        rest = [Slice(self.keys[at:], self.size)] if at < len(self.keys) else []
        return Slice(self.keys[:at], self.size), rest


def cut(sizes: Mapping[K, int], kind_of: Callable[[K], int]) -> list[Slice[K]]:
    """Cut a request into slices of one size and one kind each, in the order of their first keys."""
    alike: dict[tuple[int, int], list[K]] = {}
    for key, size in sizes.items():
        alike.setdefault((size, kind_of(key)), []).append(key)
    slices = []
    for (size, _), keys in alike.items():
        step = max(1, SLICE_BYTES // size)
        slices += [Slice(keys[i : i + step], size) for i in range(0, len(keys), step)]
    return slices
