"""Brings the next windows of a Fetch from Redis while one is sent.

A window waits for two round trips to Redis and for its bytes; without this nothing is sent
meanwhile, and nothing is loaded while it is sent.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from tailreplay.store.misses import Miss
    from tailreplay.store.pin_budget import PinBudget
    from tailreplay.store.pins import Pinned
    from tailreplay.store.record import Record
    from tailreplay.store.windows import Piece

_THREADS = 8
"""Loads of all streams at a time."""


class LookAhead:
    """Pins windows on threads of its own. Thread-safe.

    Args:
        pin: pins objects, and says for each that does not come why not; told whether it is gone.
        let_go: takes note of what came, and unpins it.
        budget: what all readers may pin; nothing is begun that would leave less than half of it.
        windows: that a stream has under way beside the one that it sends.
        window_bytes: most that each of them has on average.

    Attributes:
        closing: set when nothing under way is wanted any more.
        threads: on which windows are pinned.
    """

    def __init__(
        self,
        pin: Callable[[Sequence[Record], Callable[[], bool]], list[Pinned | Miss]],
        let_go: Callable[[Sequence[Record], Sequence[Pinned | Miss]], None],
        budget: PinBudget,
        windows: int,
        window_bytes: int,
    ) -> None:
        self.pin = pin
        self.let_go = let_go
        self.budget = budget
        self.windows = windows
        self.most_bytes = windows * window_bytes
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(_THREADS, "tailreplay-ahead")

    def close(self) -> None:
        """Gives up what is under way."""
        self.closing.set()
        self.threads.shutdown(cancel_futures=True)


class Early:
    """A window under way, with its share of the budget.

    Args:
        ahead: who brings it.
        records: its objects.
        size: their bytes.
        is_gone: whether nobody wants them any more.
    """

    def __init__(
        self, ahead: LookAhead, records: Sequence[Record], size: int, is_gone: Callable[[], bool]
    ) -> None:
        self.records = list(records)
        self.size = size
        self._ahead = ahead
        # Set by the reader's thread alone, and only once; read by the one that loads.
        self._dropped = False
        self._came: Future[list[Pinned | Miss]] = ahead.threads.submit(
            ahead.pin, self.records, lambda: self._dropped or ahead.closing.is_set() or is_gone()
        )

    def result(self) -> list[Pinned | Miss] | None:
        """What came of each, which the caller unpins; None when its load has not begun yet."""
        return None if self._came.cancel() else self._came.result()

    def drop(self) -> None:
        """Lets go of what comes, whenever it comes, and does not wait for it."""
        self._dropped = True
        self._came.cancel()
        self._came.add_done_callback(self._let_go)

    def release(self) -> None:
        """Gives its share of the budget back, once nothing of it is pinned."""
        self._ahead.budget.release(self.size)

    def wait(self) -> None:
        """Waits until nothing comes any more."""
        wait([self._came])

    def _let_go(self, came: Future[list[Pinned | Miss]]) -> None:
        if not came.cancelled() and came.exception() is None:
            self._ahead.let_go(self.records, came.result())
        self.release()


class Stream:
    """The windows of one Fetch, in order; a context that lets go of those that are not taken.

    Args:
        ahead: who brings them.
        windows: all of them.
        is_gone: whether their reader has left.
    """

    def __init__(
        self, ahead: LookAhead, windows: Iterator[list[Piece]], is_gone: Callable[[], bool]
    ) -> None:
        self._ahead = ahead
        self._windows = windows
        self._is_gone = is_gone
        # Touched by the reader's thread alone: windows that may be cut ahead, and those that are.
        self._most = ahead.windows
        self._next: deque[tuple[list[Piece], Early | None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def __iter__(self) -> Iterator[tuple[list[Piece], Early | None]]:
        """Each window, with what is under way of it, if anything is."""
        while True:
            if self._next:
                yield self._next.popleft()
            elif (window := next(self._windows, None)) is not None:
                yield window, None
            else:
                return

    def begin(self) -> None:
        """Begins to load what comes next, as much as may be.

        Behind a window that needs no loading nothing is looked at yet: it is soon sent.
        """
        while len(self._next) < self._most and (not self._next or self._next[-1][1] is not None):
            window = next(self._windows, None)
            if window is None:
                return
            self._next.append((window, self._early(window)))

    def give_up(self) -> None:
        """Drops what is under way, and begins nothing more: there is no room for it."""
        self._most = 0
        self.let_go()

    def let_go(self) -> None:
        """Drops what is under way: the window that comes first needs its share."""
        for early in self._drop():
            early.wait()

    def _drop(self) -> list[Early]:
        dropped = [early for _, early in self._next if early is not None]
        for early in dropped:
            early.drop()
        self._next = deque((window, None) for window, _ in self._next)
        return dropped

    def _early(self, window: Sequence[Piece]) -> Early | None:
        known = {p.record.name: p.record for p in window if p.record is not None}
        records = [record for record in known.values() if record.exists]
        if all(record.in_cpu for record in records):
            return None
        size = sum(record.size for record in records)
        under_way = sum(early.size for _, early in self._next if early is not None)
        if size + under_way > self._ahead.most_bytes or not self._ahead.budget.take(size):
            return None
        return Early(self._ahead, records, size, self._is_gone)
