"""Leases: what a reader has pinned, for how long, and how it ends.

A lease is renewed by every frame that its reader is offered, and rests once the reader has taken
it: what the store itself waits for is no stall. One whose reader leaves a frame for longer than the
stall limit is over: its stream is cancelled and its pins are given back. Ending a lease twice, or
one that never was, is no error and touches no other reader's pins.
"""

from __future__ import annotations

import math
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Lease:
    """One reader's claim.

    Attributes:
        lease_id: 16 random bytes.
        renewed_at_s: when its reader was offered what it has not taken; infinity when nothing.
        cancel: ends the reader's stream.
        over: whether it has ended.
    """

    lease_id: bytes
    renewed_at_s: float
    cancel: Callable[[], object]
    over: bool = False


class Leases:
    """Every open lease.

    Args:
        stall_limit_s: how long a reader may take nothing.
        clock: seconds that only grow; stepped by tests.
    """

    def __init__(self, stall_limit_s: float, clock: Callable[[], float]) -> None:
        self.stall_limit_s = stall_limit_s
        self._clock = clock
        # Guarded by _lock: the leases that are not over, by id.
        self._open: dict[bytes, Lease] = {}
        self._lock = threading.Lock()

    def grant(self, cancel: Callable[[], object]) -> Lease:
        """Opens a lease whose stream `cancel` would end."""
        lease = Lease(secrets.token_bytes(16), self._clock(), cancel)
        with self._lock:
            self._open[lease.lease_id] = lease
        return lease

    def renew(self, lease: Lease) -> bool:
        """Starts the clock for what the reader is offered now; False when the lease is over."""
        with self._lock:
            lease.renewed_at_s = self._clock()
            return not lease.over

    def rest(self, lease: Lease) -> None:
        """Stops the clock: the reader has taken everything it was offered."""
        with self._lock:
            lease.renewed_at_s = math.inf

    def end(self, lease_id: bytes) -> bool:
        """Ends a lease without touching its stream; False when it was not open."""
        with self._lock:
            lease = self._open.pop(lease_id, None)
            if lease is not None:
                lease.over = True
        return lease is not None

    def expire(self) -> int:
        """Ends every stalled lease and cancels its stream; returns how many."""
        limit = self._clock() - self.stall_limit_s
        with self._lock:
            stalled = [lease for lease in self._open.values() if lease.renewed_at_s < limit]
            for lease in stalled:
                lease.over = True
                del self._open[lease.lease_id]
        for lease in stalled:
            lease.cancel()
        return len(stalled)

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)
