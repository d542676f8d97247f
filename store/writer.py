"""Put: takes objects of one prefix, checks every byte once, and lists them last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import tokens as wire_tokens
from tailreplay.store.errors import InvalidRequest, LimitExceeded
from tailreplay.store.header import Header, header_bytes, rename, verify_object
from tailreplay.store.objects import (
    BLOCK_TOKENS,
    MAX_TAIL_FIGURES_BYTES,
    TAIL_FIGURE_BYTES,
    Kind,
    ObjectName,
)
from tailreplay.store.prompt import Prompt
from tailreplay.store.tiers import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.sightings import Sightings
    from tailreplay.store.tiers import Tiers


class Writer:
    """Stores objects of one prefix at a time, whichever way their bytes come.

    Args:
        catalog: lists what has arrived.
        tiers: keeps it.
        digest_key: gives the key of the running digests for a namespace.
        max_object_bytes: largest object taken.
        sightings: what has been offered before, if only that is to be taken.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        digest_key: Callable[[bytes], bytes],
        max_object_bytes: int,
        sightings: Sightings | None = None,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._sightings = sightings
        self._digest_key = digest_key
        self._max_object_bytes = max_object_bytes

    def put(
        self, frames: Iterator[pb.PutFrame], owned: Callable[[pb.PutBegin], bytes]
    ) -> pb.PutResponse:
        """Stores a stream of objects; those stored before an error stay stored.

        Args:
            frames: what the writer sends.
            owned: says in which namespace to keep them.

        Raises:
            InvalidRequest: frames out of order, or positions that are not on the block grid.
            IntegrityError: an object is not what it should be at its position.
            GeometryMismatch: it has another shape than its namespace.
            LimitExceeded: it is too large.
        """
        first = next(frames, None)
        if first is None or first.WhichOneof("frame") != "begin":
            found = first.WhichOneof("frame") if first is not None else "nothing"
            raise InvalidRequest(f"a Put stream starts with `{found}`, wanted `begin`")
        with self.open(first.begin, owned(first.begin)) as session:
            for frame in frames:
                if frame.WhichOneof("frame") != "object":
                    raise InvalidRequest(f"got `{frame.WhichOneof('frame')}`, wanted `object`")
                if not session.claim(frame.object) or not session.store(
                    frame.object, lambda view: _receive(frames, view)
                ):
                    _drain(frames, frame.object.size_bytes)
            return session.response

    def open(self, begin: pb.PutBegin, namespace: bytes) -> PutSession:
        """Starts storing objects of one prefix; to be used as a context.

        Args:
            begin: whose objects; prefixes are named by its namespace.
            namespace: the one to keep them in.

        Raises:
            InvalidRequest: its tokens are malformed.
        """
        tokens = wire_tokens.from_wire(begin.tokens)
        prompt = Prompt(namespace, tokens, self._digest_key(namespace), begin.namespace)
        return PutSession(
            self._catalog, self._tiers, prompt, self._max_object_bytes, self._sightings
        )


class PutSession:
    """One prefix being stored. What it has claimed and not stored is given back at its end.

    Attributes:
        response: what has become of the objects so far.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        prompt: Prompt,
        max_object_bytes: int,
        sightings: Sightings | None,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._prompt = prompt
        self._max_object_bytes = max_object_bytes
        self._sightings = sightings
        self._claimed: set[ObjectName] = set()
        self.response = pb.PutResponse()

    def __enter__(self) -> PutSession:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._claimed:
            self._catalog.unclaim(name)
        self._catalog.used_prefix(self._prompt)

    def claim(self, wanted: pb.PutObject) -> bool:
        """Whether the caller should send an object.

        False when it is there, on its way, or offered for the first time where that is too early.

        Raises:
            InvalidRequest, LimitExceeded: it can not be stored.
        """
        self._check(wanted)
        name = self._name(wanted)
        if not self._catalog.claim(self._prompt, name, wanted.end_token, wanted.size_bytes):
            self.response.duplicates += 1
            return False
        if self._sightings is not None and not self._sightings.again(name):
            self._catalog.unclaim(name)
            self._catalog.count("not_admitted_objects")
            self.response.not_admitted += 1
            return False
        self._claimed.add(name)
        return True

    def store(self, wanted: pb.PutObject, receive: Callable[[memoryview], None]) -> bool:
        """Stores a claimed object; False when there is no room, and nothing was received.

        What is there already may be approximate; then it gives way to what comes.

        Args:
            wanted: what was claimed.
            receive: fills the given memory with the object's bytes.

        Raises:
            IntegrityError, InvalidRequest, GeometryMismatch: its bytes are not what they should be.
        """
        name = self._name(wanted)
        outcome, header = self._fill(name, wanted, receive)
        self._claimed.discard(name)
        if outcome is not PutOutcome.STORED or header is None:
            self.response.duplicates += outcome is PutOutcome.EXISTS
            self.response.dropped += outcome is PutOutcome.FULL
            self._catalog.count("dropped_objects", int(outcome is PutOutcome.FULL))
            return False
        size = wanted.size_bytes
        if not self._catalog.admit(
            self._prompt, name, wanted.end_token, size, header.provenance, wanted.tail_figures
        ):
            self._tiers.delete([name])
            self.response.dropped += 1
            self._catalog.count("dropped_objects")
            return True
        self.response.stored += 1
        self.response.stored_bytes += size
        return True

    def _name(self, wanted: pb.PutObject) -> ObjectName:
        prefix_hash = self._prompt.chain.prefix_hash(wanted.end_token)
        return ObjectName(self._prompt.namespace, Kind(wanted.kind), prefix_hash)

    def _fill(
        self, name: ObjectName, wanted: pb.PutObject, receive: Callable[[memoryview], None]
    ) -> tuple[PutOutcome, Header | None]:
        headers: list[Header] = []

        def fill(view: memoryview) -> None:
            receive(view)
            header = verify_object(view, replace(name, namespace=self._prompt.sent_namespace))
            if name.namespace != self._prompt.sent_namespace:
                rename(view, header, name.namespace)
            if (header.first_token, header.end_token) != (wanted.first_token, wanted.end_token):
                raise InvalidRequest(
                    f"object holds rows [{header.first_token}, {header.end_token}), "
                    f"announced [{wanted.first_token}, {wanted.end_token})"
                )
            self._catalog.check_geometry(name.namespace, header.geometry)
            headers.append(header)

        outcome = PutOutcome.FULL
        try:
            if not self._catalog.allow(name.namespace, wanted.size_bytes):
                return PutOutcome.FULL, None
            outcome = self._tiers.put(name, wanted.size_bytes, fill)
            if outcome is PutOutcome.EXISTS and self._tiers.evict([name]):
                # It was approximate, or a load from Redis that nobody waited for left it unlisted.
                outcome = self._tiers.put(name, wanted.size_bytes, fill)
            while outcome is PutOutcome.FULL and self._catalog.make_room(wanted.size_bytes):
                outcome = self._tiers.put(name, wanted.size_bytes, fill)
        finally:
            if outcome is not PutOutcome.STORED:
                self._catalog.unclaim(name)
        return outcome, headers[0] if headers else None

    def _check(self, wanted: pb.PutObject) -> None:
        total = len(self._prompt)
        first, end, kind = wanted.first_token, wanted.end_token, int(wanted.kind)
        if kind not in set(Kind):
            raise InvalidRequest(f"object has kind {kind}, wanted one of {[k.name for k in Kind]}")
        if wanted.size_bytes < header_bytes(1):
            raise InvalidRequest(
                f"object has {wanted.size_bytes} bytes, wanted at least {header_bytes(1)}"
            )
        if wanted.size_bytes > self._max_object_bytes:
            raise LimitExceeded(
                f"object has {wanted.size_bytes} bytes, wanted at most {self._max_object_bytes}"
            )
        if not first < end <= total:
            raise InvalidRequest(
                f"object covers [{first}, {end}), wanted a part of [0, {total}), the tokens in "
                "`begin`"
            )
        figures = len(wanted.tail_figures)
        most = MAX_TAIL_FIGURES_BYTES if kind == Kind.HIDDEN else 0
        if figures > most or figures % TAIL_FIGURE_BYTES:
            raise InvalidRequest(
                f"{Kind(kind).name} object has {figures} bytes of tail figures, wanted a multiple "
                f"of {TAIL_FIGURE_BYTES} up to {most}"
            )
        grid = BLOCK_TOKENS[Kind(kind)]
        if first % grid or end != min(first + grid, total):
            raise InvalidRequest(
                f"{Kind(kind).name} object covers [{first}, {end}) of {total} tokens, "
                "which is no block of its kind's grid"
            )


def _receive(frames: Iterator[pb.PutFrame], view: memoryview) -> None:
    """Writes the chunks that follow into `view`, which they must fill exactly."""
    at = 0
    while at < len(view):
        chunk = _chunk(frames, len(view) - at)
        view[at : at + len(chunk)] = chunk
        at += len(chunk)


def _drain(frames: Iterator[pb.PutFrame], size: int) -> None:
    while size:
        size -= len(_chunk(frames, size))


def _chunk(frames: Iterator[pb.PutFrame], wanted: int) -> bytes:
    frame = next(frames, None)
    if frame is None or frame.WhichOneof("frame") != "chunk" or not frame.chunk:
        raise InvalidRequest(f"stream ends or changes while {wanted} bytes of an object are due")
    if len(frame.chunk) > wanted:
        raise InvalidRequest(f"chunk has {len(frame.chunk)} bytes, only {wanted} are due")
    return bytes(frame.chunk)
