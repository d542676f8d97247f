"""Ends streams that nobody has closed, on a thread that holds no lock.

A suspended generator that becomes garbage is ended by the collector, which runs at any allocation
of any thread, and so in one that holds the very lock that the generator's end needs: it waits for
itself. Here no generator of a stream ever is garbage before it has ended.
"""

from __future__ import annotations

import inspect
import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Self

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Abandoned:
    """The streams of a store that have not ended. Thread-safe."""

    def __init__(self) -> None:
        # Changed by single operations, that the collector may come between but not into: streams
        # that have not ended, by identity, and those of them that nobody has any more.
        self._open: dict[int, Generator[object, None, None]] = {}
        self._left: SimpleQueue[Generator[object, None, None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-abandoned", daemon=True)
        self._thread.start()

    def guard(self, stream: Generator[T, None, None]) -> Guarded[T]:
        """A stream that ends here if whoever has it lets it fall."""
        self._open[id(stream)] = stream
        return Guarded(self, stream)

    def ended(self, stream: Generator[object, None, None]) -> None:
        """Lets go of a stream that has ended."""
        self._open.pop(id(stream), None)

    def leave(self, stream: Generator[object, None, None]) -> None:
        """Has a stream ended that nobody has any more; takes no lock."""
        # Of its methods `put` alone may be called by the collector in the middle of another.
        if id(stream) in self._open:
            self._left.put(stream)

    def close(self) -> None:
        """Ends all streams but those that are giving something in another thread, and stops.

        What somebody still has would else end when its memory is gone.
        """
        self._left.put(None)
        self._thread.join()
        for stream in list(self._open.values()):
            self._end(stream)

    def _run(self) -> None:
        while (stream := self._left.get()) is not None:
            self._end(stream)

    def _end(self, stream: Generator[object, None, None]) -> None:
        try:
            if inspect.getgeneratorstate(stream) != inspect.GEN_RUNNING:
                stream.close()
        except Exception:
            logger.exception("a stream that was left did not end as it should")
        self.ended(stream)


class Guarded(Generic[T]):
    """Iterates over a stream, which is held by its `Abandoned` and does not know this.

    Args:
        abandoned: ends it in the end.
        stream: which.
    """

    def __init__(self, abandoned: Abandoned, stream: Generator[T, None, None]) -> None:
        self._abandoned = abandoned
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            return next(self._stream)
        except BaseException:
            self._abandoned.ended(self._stream)
            raise

    def close(self) -> None:
        """Ends it now, in this thread."""
        try:
            self._stream.close()
        finally:
            self._abandoned.ended(self._stream)

    def __del__(self) -> None:
        self._abandoned.leave(self._stream)
