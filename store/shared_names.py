"""What clients call namespaces, told to other stores, and to this one after a restart, by Redis."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from tailreplay.store.batches import batches
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.ledger import WRITTEN_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.client_names import ClientNames
    from tailreplay.store.ledger import Ledger

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0
_ASK_EVERY_S = 30.0
_MOST_ASKED = 1000


class SharedNames:
    """Keeps names in step with Redis; without it there is nothing to do.

    Args:
        names: what this store knows.
        catalog: which namespaces there are.
        ledger: what Redis knows; None without Redis.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        names: ClientNames,
        catalog: Catalog,
        ledger: Ledger | None,
        clock: Callable[[], float],
    ) -> None:
        self._names = names
        self._catalog = catalog
        self._ledger = ledger
        self._clock = clock
        # Touched by one thread at a time: when Redis was last told, and asked.
        self._told_at_s = -math.inf
        self._asked_at_s = -math.inf
        # Guarded by _lock: what Redis was told, and until when that will do.
        self._lock = threading.Lock()
        self._told: dict[bytes, tuple[bytes, float]] = {}

    def ask(self) -> None:
        """Learns the names of namespaces that nobody has used here yet.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        if self._ledger is None:
            return
        self._asked_at_s = self._clock()
        nameless = [space for space in self._catalog.spaces() if not self._names.sent(space)]
        for some in batches(nameless, _MOST_ASKED):
            found = self._ledger.names_of(some)
            for space, sent in found.items():
                self._names.learn(space, sent)

    def tick(self) -> None:
        """Tells Redis what is new, and asks now and then; called often."""
        now_s = self._clock()
        try:
            if now_s - self._told_at_s >= _TELL_EVERY_S:
                self._told_at_s = now_s
                self._tell()
            if now_s - self._asked_at_s >= _ASK_EVERY_S:
                self.ask()
        except StoreUnavailable as error:
            logger.debug("names of namespaces: %s", error)

    def redis_lost(self) -> None:
        """Tells all of it once more, since Redis may have forgotten it."""
        with self._lock:
            self._told.clear()

    def _tell(self) -> None:
        if self._ledger is None:
            return
        names, now_s = self._names.all(), self._clock()
        with self._lock:
            self._told = {s: told for s, told in self._told.items() if s in names}
            known = {s: n for s, (n, until_s) in self._told.items() if now_s < until_s}
        # A name that is the namespace's own is no news to anybody.
        news = {s: n for s, n in names.items() if n not in (s, known.get(s))}
        self._ledger.name(news)
        with self._lock:
            until_s = now_s + WRITTEN_EVERY_S
            self._told |= {space: (sent, until_s) for space, sent in news.items()}
