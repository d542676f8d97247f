"""Erasures and clearings that all stores of one Redis carry out, asked for at any of them.

Whose a namespace is reaches Redis a second after its first put, and what is in a store's pool is
known to that store alone. So an erasure is asked of all: each takes out what it has of the tenant,
known to Redis or not, and says which namespaces those were. What Redis has of any of them is
deleted last, by the store at which it was asked for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from tailreplay.store.erasure_ledger import new_erasure_id
from tailreplay.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from tailreplay.store.eraser import Erased, Eraser
    from tailreplay.store.erasure_ledger import Erasure, ErasureLedger

logger = logging.getLogger(__name__)

_LIVE_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05
_ROUNDS = 3
"""Times that stores are asked again, since one of them knew of more namespaces."""

_AGAIN_S = (1.0, 4.0, 12.0)
"""So long after it was done here it is looked for what was read of in Redis meanwhile: the asker
deletes that last, and waits up to ten seconds before it does."""

_KNOWN_S = 2 * 24 * 3600.0
"""For so long it is known what was asked for and done, whatever Redis still knows of it."""


class Erasures:
    """Erases here and at all other stores. Thread-safe.

    Args:
        ledger: by which stores ask each other; None without Redis.
        eraser: deletes in Redis.
        here: takes out what this store has; not in Redis.
        patience_s: how long to wait for other stores.
    """

    def __init__(
        self,
        ledger: ErasureLedger | None,
        eraser: Eraser,
        here: Callable[[Erasure], Erased],
        patience_s: float = 10.0,
    ) -> None:
        self._ledger = ledger
        self._eraser = eraser
        self._here = here
        self._patience_s = patience_s
        # Touched by `tick` alone, up to `_again`: when this store last said that it lives; and the
        # namespaces it has gone through for erasures it could not end, as Redis did not answer.
        self._lived_at_s = -math.inf
        self._gone_through: dict[bytes, frozenset[bytes]] = {}
        # And what is to be looked for again, and when.
        self._again: list[tuple[float, Erased, bool]] = []
        # Guarded by _lock: since when erasures need nothing more here, None before it has joined;
        # those that were asked for here, but for blocks; and whether Redis may have lost them.
        self._lock = threading.Lock()
        self._done: dict[bytes, float] | None = None
        self._own: dict[bytes, Erasure] = {}
        self._is_lost = False

    def join(self) -> None:
        """Counts this store in; what was asked for before is nothing that it has.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        if self._ledger is not None:
            self._ledger.live()
            with self._lock:
                self._done = dict.fromkeys(self._ledger.asked(), time.monotonic())

    def leave(self) -> None:
        """Counts it out: its pool goes."""
        if self._ledger is not None:
            try:
                self._ledger.leave()
            except StoreUnavailable as error:
                logger.debug("others will wait for this store for a while: %s", error)

    def known_of(self, tenant: bytes) -> frozenset[bytes]:
        """Namespaces of a tenant that was erased or cleared in the last days.

        Whose they were is known to nobody else by now.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        asked = self._ledger.asked().values() if self._ledger is not None else ()
        return frozenset().union(*(one.namespaces for one in asked if one.tenant == tenant))

    def redis_lost(self) -> None:
        """Has what was asked for here asked again, for who has not heard of it before."""
        with self._lock:
            self._is_lost = True

    def everywhere(self, erasure: Erasure, names: Collection[bytes] = ()) -> Erased:
        """Erases here, at all other stores, and in Redis, and counts what is left.

        Args:
            erasure: what.
            names: of prefixes, whose keys in Redis are to go whether or not they are known here.

        Raises:
            StoreUnavailable: Redis does not answer, so that there is no proof; this store's CPU
                tier has been cleared.
        """
        if self._ledger is None:
            return self._here(erasure)
        try:
            done = self._here(erasure)
            if done.names is not None:
                done.names.update(names)
            self._close(self._ledger, self._ask_others(self._ledger, erasure, done), done)
            self._eraser.delete_in_redis(done)
            self._eraser.drop_again(done, overwrite=not erasure.clears)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"the CPU tier was cleared, Redis was not: {error}") from error
        return done

    def tick(self) -> None:
        """Says that this store lives, and does what others have asked for; called often."""
        if self._ledger is None:
            return
        try:
            if time.monotonic() - self._lived_at_s >= _LIVE_EVERY_S:
                self._ledger.live()
                self._lived_at_s = time.monotonic()
            asked = self._ledger.asked()
            self._ask_again(self._ledger, asked)
            self._carry_out(self._ledger, asked)
            self._look_again()
        except StoreUnavailable as error:
            logger.debug("other stores' erasures wait: %s", error)

    def _carry_out(self, ledger: ErasureLedger, asked: Mapping[bytes, Erasure]) -> None:
        with self._lock:
            has_joined = self._done is not None
            todo = asked.keys() - (self._done or {}).keys()
        for erasure_id in todo:
            erasure = asked[erasure_id]
            before = self._gone_through.get(erasure_id, frozenset())
            done = self._here(erasure._replace(namespaces=erasure.namespaces | before))
            self._gone_through[erasure_id] = frozenset(done.namespaces)
            # Redis was away when this store began: what is there now may be newer than the erasure.
            if has_joined and not ledger.answer(erasure_id, done):
                self._finish_late(ledger, erasure, done)
            self._note_done(erasure_id)
            self._gone_through.pop(erasure_id, None)
            now_s, overwrite = time.monotonic(), not erasure.clears
            self._again += [(now_s + after_s, done, overwrite) for after_s in _AGAIN_S]
            logger.info("forgot %d objects, as another store was asked to", done.objects)
        with self._lock:
            now_s = time.monotonic()
            known = self._done or dict.fromkeys(asked, now_s)
            self._done = {i: at for i, at in known.items() if i in asked or now_s < at + _KNOWN_S}
            self._own = {i: own for i, own in self._own.items() if i in self._done}

    def _look_again(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self._again if one[0] <= now_s]
        self._again = [one for one in self._again if one[0] > now_s]
        for _, done, overwrite in due:
            self._eraser.drop_again(done, overwrite=overwrite)

    def _finish_late(self, ledger: ErasureLedger, erasure: Erasure, done: Erased) -> None:
        """Does what the asker has not, since this store was not done by then.

        It tells all of namespaces that they have not heard of, which they may have read of. What
        was only cleared may have been stored anew, so its payload is left as it is by now.
        """
        if not (erasure.everything or erasure.block or done.namespaces <= erasure.namespaces):
            # Named alone: what the tenant stores from now on is not to go.
            own = erasure._replace(tenant=b"", namespaces=frozenset(done.namespaces))
            erasure_id = self._own_id(own)
            ledger.close(erasure_id)
            ledger.ask(erasure_id, own)
        if erasure.clears:
            self._eraser.sweep_in_redis(done)
        else:
            self._eraser.delete_in_redis(done)

    def _ask_again(self, ledger: ErasureLedger, asked: Mapping[bytes, Erasure]) -> None:
        with self._lock:
            lost = {i: own for i, own in self._own.items() if self._is_lost and i not in asked}
        for erasure_id, erasure in lost.items():
            ledger.close(erasure_id)
            ledger.ask(erasure_id, erasure)
        with self._lock:
            self._is_lost = self._is_lost and any(i not in asked for i in self._own)

    def _ask_others(self, ledger: ErasureLedger, erasure: Erasure, done: Erased) -> list[bytes]:
        """Has all others erase theirs, until none knows of more; adds what they did.

        One is asked of which Redis knows nothing, too: it was held up, or Redis has lost its word.
        """
        asked = []
        for _ in range(_ROUNDS):
            others = ledger.others()
            known = frozenset(done.namespaces)
            own = erasure._replace(namespaces=known)
            asked.append(erasure_id := self._own_id(own))
            ledger.ask(erasure_id, own)
            self._wait(ledger, erasure_id, others, done)
            if not others or done.namespaces <= known or erasure.everything:
                break
            done.add(self._here(erasure._replace(namespaces=frozenset(done.namespaces))))
        return asked

    def _own_id(self, erasure: Erasure) -> bytes:
        """An id for what is asked for here, and is done here."""
        erasure_id = new_erasure_id()
        self._note_done(erasure_id)
        if not erasure.block:
            with self._lock:
                self._own[erasure_id] = erasure
        return erasure_id

    def _close(self, ledger: ErasureLedger, asked: Collection[bytes], done: Erased) -> None:
        """Waits no more: who has not answered by now deletes in Redis itself."""
        for erasure_id in asked:
            ledger.close(erasure_id)
            for answer in ledger.answers(erasure_id).values():
                done.namespaces |= answer.namespaces

    def _note_done(self, erasure_id: bytes) -> None:
        with self._lock:
            if self._done is not None:
                self._done[erasure_id] = time.monotonic()

    def _wait(
        self, ledger: ErasureLedger, erasure_id: bytes, others: set[bytes], done: Erased
    ) -> None:
        pause, give_up_s = threading.Event(), time.monotonic() + self._patience_s
        while True:
            answers = ledger.answers(erasure_id)
            if others <= answers.keys() or time.monotonic() >= give_up_s:
                break
            pause.wait(_LOOK_EVERY_S)
        for answer in answers.values():
            done.add(answer)
        done.stores = max(done.stores, len(others))
        done.silent_stores = len(others - answers.keys())
