"""Which rows a Fetch sends together: pieces of objects, cut into windows that are pinned at a time.

Decides only; the reader carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tailreplay.store.objects import ObjectName
    from tailreplay.store.record import Record

_MAX_OBJECTS = 256
_MAX_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, end) of one object for one range.

    Attributes:
        number: which range.
        wanted: that range.
        record: the object; None where nothing is known.
        first: position of the first row.
        end: one past the position of the last.
        last: whether the range ends with it.
    """

    number: int
    wanted: pb.Range
    record: Record | None
    first: int
    end: int
    last: bool


def is_urgent(window: Sequence[Piece]) -> bool:
    """Whether a replay waits for it: a window holds hiddens and states, or keys and values."""
    return any(piece.wanted.kind != pb.KIND_KV for piece in window)


def windows(pieces: Iterable[Piece], window_bytes: int, load_bytes: int) -> Iterator[list[Piece]]:
    """Cuts pieces, in order, into runs whose distinct objects fit the window; never an empty one.

    A window holds one urgency only, so that hiddens never wait behind keys and values, and has at
    most `load_bytes` to load, so that what is loaded first goes out first.

    Args:
        pieces: what is wanted; taken as windows are, never all at once.
        window_bytes: most bytes of a window's objects; one that is larger comes alone.
        load_bytes: most bytes of those that the CPU tier does not have.
    """
    window: list[Piece] = []
    held: set[ObjectName] = set()
    size = loading = 0
    for piece in pieces:
        record = piece.record
        is_new = record is not None and record.name not in held
        extra = record.size if record is not None and is_new else 0
        to_load = extra if record is not None and not record.in_cpu else 0
        full = (
            size + extra > window_bytes
            or loading + to_load > load_bytes
            or len(held) >= _MAX_OBJECTS
            or len(window) >= _MAX_PIECES
        )
        if window and (full or window[-1].wanted.kind != piece.wanted.kind):
            yield window
            window, held, size, loading = [], set(), 0, 0
            extra = record.size if record is not None else 0
            to_load = extra if record is not None and not record.in_cpu else 0
        window.append(piece)
        size, loading = size + extra, loading + to_load
        if record is not None:
            held.add(record.name)
    if window:
        yield window
