"""What clients call the namespaces that a store keeps under names of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class ClientNames:
    """What each namespace was called by those who stored or found something in it. Thread-safe.

    Args:
        scoped: whether the store keeps namespaces under names of its own, as it does where callers
            have tokens; else clients call them as it does.
    """

    def __init__(self, *, scoped: bool = True) -> None:
        self._scoped = scoped
        # Guarded by _lock: names by namespace.
        self._lock = threading.Lock()
        self._sent: dict[bytes, bytes] = {}

    def note(self, namespace: bytes, sent: bytes) -> None:
        """Notes what a client calls a namespace."""
        with self._lock:
            self._sent[namespace] = sent

    def learn(self, namespace: bytes, sent: bytes) -> None:
        """Notes what another store says that clients call a namespace."""
        with self._lock:
            self._sent.setdefault(namespace, sent)

    def sent(self, namespace: bytes) -> bytes:
        """What clients call a namespace; empty if that is not known."""
        with self._lock:
            return self._sent.get(namespace, b"" if self._scoped else namespace)

    def all(self) -> dict[bytes, bytes]:
        """Names by namespace, as far as they were noted."""
        with self._lock:
            return dict(self._sent)

    def keep_only(self, namespaces: Collection[bytes]) -> None:
        """Forgets all others."""
        with self._lock:
            for namespace in self._sent.keys() - set(namespaces):
                del self._sent[namespace]
