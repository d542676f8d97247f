"""The GPU tier: exact objects in memory set aside on the engine's device, the last used first."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailreplay.connector.device_rows import SLOT_BYTES, DeviceRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor

    from tailreplay.store.objects import ObjectName

    Shape = tuple[int, int, int]

HIDDEN_WINDOW_TOKENS = 2048
"""Hiddens are kept this far back from a prompt's end, where the next one is likely to part."""


@dataclass(slots=True)
class _Object:
    """Where an object lies, what it looks like, and how many have it in use."""

    slots: list[int]
    shape: Shape
    holds: int = 0


class DevicePool:
    """Holds pages of keys, values and hiddens, and states. Thread-safe.

    Nothing approximate is put here, and a name stands for a namespace and the tokens up to the
    object's end, so whatever is found may be used as it is. Its memory is all it ever takes: an
    object lies in slots, wherever some are free.

    Args:
        memory: uint8 on the device, the pool's own from now on.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory[: len(memory) // SLOT_BYTES * SLOT_BYTES].view(-1, SLOT_BYTES)
        # Guarded by _lock: objects, least recently used first, and the slots of none.
        self._lock = threading.Lock()
        self._objects: OrderedDict[ObjectName, _Object] = OrderedDict()
        self._free = list(range(len(self._memory)))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._memory.device

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are taken."""
        with self._lock:
            return (len(self._memory) - len(self._free)) * SLOT_BYTES

    def __contains__(self, name: ObjectName) -> bool:
        """Whether an object is there; does not count as use."""
        with self._lock:
            return name in self._objects

    def hold(self, names: Iterable[ObjectName]) -> DeviceRows | None:
        """Takes into use what is there of objects of one kind, up to the first that is not.

        They count as used, the first as the last, and stay until they are released.
        """
        with self._lock:
            found: list[_Object] = []
            used: list[ObjectName] = []
            for name in names:
                if (one := self._objects.get(name)) is None:
                    break
                found.append(one)
                used.append(name)
            for one in found:
                one.holds += 1
            self._use(used)
        if not found:
            return None
        slots = torch.tensor([one.slots for one in found], device=self.device)
        return DeviceRows(self._memory, slots, found[0].shape, lambda: self._release(found))

    def put(
        self,
        names: Sequence[ObjectName],
        shape: Shape,
        make: Callable[[Sequence[int]], Tensor],
        before: Collection[ObjectName] = (),
    ) -> None:
        """Takes those of some objects that are not there; others go for them.

        Args:
            names: what they are called, the one of most use first; where room is short, those
                named first come in.
            shape: units, rows and bytes a row of each.
            make: gives those with these numbers, `[n, units, rows, row bytes]` uint8.
            before: what is of more use than they; it stays, and counts as used after them.
        """
        slots = math.ceil(math.prod(shape) / SLOT_BYTES)
        with self._lock:
            lacking = [n for n, name in enumerate(names) if name not in self._objects]
            room = self._make_room(slots * len(lacking), {*names, *before})
            if lacking := lacking[: room // slots]:
                made = make(lacking).flatten(1)
                own = [[self._free.pop() for _ in range(slots)] for _ in lacking]
                self._write(own, made)
                for number, taken in zip(lacking, own, strict=True):
                    self._objects[names[number]] = _Object(taken, shape)
            self._use([*before, *names])

    def _make_room(self, wanted: int, kept: Collection[ObjectName]) -> int:
        """Lets the least recently used go until there are so many free slots; says how many."""
        room = len(self._free)
        gone = []
        for name, one in self._objects.items():
            if room >= wanted:
                break
            if not one.holds and name not in kept:
                gone.append(name)
                room += len(one.slots)
        for name in gone:
            self._free.extend(self._objects.pop(name).slots)
        return room

    def _write(self, slots: list[list[int]], made: Tensor) -> None:
        wanted = len(slots[0]) * SLOT_BYTES
        padded = torch.nn.functional.pad(made, (0, wanted - made.shape[1]))
        places = torch.tensor(slots, device=self.device).flatten()
        self._memory[places] = padded.to(self.device).view(-1, SLOT_BYTES)

    def _use(self, names: Sequence[ObjectName]) -> None:
        for name in reversed(names):
            if name in self._objects:
                self._objects.move_to_end(name)

    def _release(self, found: list[_Object]) -> None:
        with self._lock:
            for one in found:
                one.holds -= 1
