"""Objects on their way to the store, and the frames that carry them over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tailreplay.proto import store_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Parts: TypeAlias = Sequence[bytes | memoryview]

CHUNK_BYTES = 1 << 20
"""Bytes of an object per Put message."""


class ObjectBytes:
    """One object on its way to the store.

    Args:
        announce: what it is.
        parts: its bytes in order, header first, or what gives them: called when the store wants
            the object, at most once. Only read while it is sent.
    """

    __slots__ = ("_parts", "announce")

    def __init__(self, announce: pb.PutObject, parts: Parts | Callable[[], Parts]) -> None:
        self.announce = announce
        self._parts = parts

    @property
    def parts(self) -> Parts:
        """Its bytes in order."""
        return self._parts() if callable(self._parts) else self._parts


def put_frames(
    begin: pb.PutBegin, objects: Iterable[ObjectBytes], faults: list[Exception]
) -> Iterator[pb.PutFrame]:
    """Frames of a Put; notes what the objects' `parts` raise."""
    yield pb.PutFrame(begin=begin)
    for item in objects:
        yield pb.PutFrame(object=item.announce)
        try:
            parts = item.parts
        except Exception as fault:
            faults.append(fault)
            raise
        for part in parts:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), CHUNK_BYTES):
                yield pb.PutFrame(chunk=bytes(view[at : at + CHUNK_BYTES]))
