"""The GPU tier: rows of exact objects in the engine's own device memory, the last used first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from tailreplay.store.objects import ObjectName

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from tailreplay.store.objects import Kind


class DevicePool:
    """Holds pages of keys, values and hiddens, and states, up to a number of bytes. Thread-safe.

    Nothing approximate is put here, and a name stands for the tokens up to its end, so whatever
    is found may be used as it is.

    Args:
        most_bytes: what it may hold.
        device: where it is.
        namespace: of all its objects.
    """

    def __init__(self, most_bytes: int, device: torch.device, namespace: bytes) -> None:
        self.most_bytes = most_bytes
        self.device = device
        self._namespace = namespace
        # Guarded by _lock: objects, least recently used first, and their bytes.
        self._lock = threading.Lock()
        self._objects: OrderedDict[ObjectName, Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._bytes

    def name(self, kind: Kind, prefix_hash: bytes) -> ObjectName:
        """What an object is called here; pages of keys, values and hiddens by their end."""
        return ObjectName(self._namespace, kind, prefix_hash)

    def get(self, name: ObjectName) -> Tensor | None:
        """An object `[units, rows, row bytes]` uint8, not to be written to; None if absent.

        It stays good for who has it, even if the pool gives it up.
        """
        with self._lock:
            found = self._objects.get(name)
            if found is not None:
                self._objects.move_to_end(name)
            return found

    def put(self, name: ObjectName, size: int, make: Callable[[], Tensor]) -> None:
        """Takes an object that is not there; others go for it.

        Args:
            name: what to call it.
            size: its bytes; one that is larger than the pool is not taken.
            make: gives it, in memory of its own, on the device.
        """
        if size > self.most_bytes or self.get(name) is not None:
            return
        made = make()
        with self._lock:
            if name in self._objects:
                return
            self._objects[name] = made
            self._bytes += size
            while self._bytes > self.most_bytes:
                _, gone = self._objects.popitem(last=False)
                self._bytes -= gone.nbytes
