"""Put: takes objects of one prefix, checks every byte once, and lists them last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import tokens as wire_tokens
from tailreplay.store.catalog import Prefix
from tailreplay.store.chain import PrefixChain, running_digests
from tailreplay.store.errors import InvalidRequest, LimitExceeded
from tailreplay.store.header import Header, header_bytes, verify_object
from tailreplay.store.objects import BLOCK_TOKENS, Kind, ObjectName
from tailreplay.store.tiers import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.store.catalog import Catalog
    from tailreplay.store.tiers import Tiers


class Writer:
    """Serves Put streams.

    Args:
        catalog: lists what has arrived.
        tiers: keeps it.
        digest_key: gives the key of the running digests for a namespace.
        max_object_bytes: largest object taken.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        digest_key: Callable[[bytes], bytes],
        max_object_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._digest_key = digest_key
        self._max_object_bytes = max_object_bytes

    def put(self, frames: Iterator[pb.PutFrame]) -> pb.PutResponse:
        """Stores a stream of objects; those stored before an error stay stored.

        Raises:
            InvalidRequest: frames out of order, or positions that are not on the block grid.
            IntegrityError: an object is not what it should be at its position.
            GeometryMismatch: it has another shape than its namespace.
            LimitExceeded: it is too large.
        """
        first = next(frames, None)
        if first is None or first.WhichOneof("frame") != "begin":
            raise InvalidRequest("a Put stream starts with `begin`")
        begin = first.begin
        tokens = wire_tokens.from_wire(begin.tokens)
        digests = running_digests(self._digest_key(begin.namespace), tokens)
        prefix = Prefix(begin.namespace, digests, PrefixChain(begin.namespace, tokens))
        response = pb.PutResponse()
        try:
            for frame in frames:
                if frame.WhichOneof("frame") != "object":
                    raise InvalidRequest(f"got `{frame.WhichOneof('frame')}`, wanted `object`")
                self._put_object(prefix, len(tokens), frame.object, frames, response)
        finally:
            self._catalog.used_prefix(prefix)
        return response

    def _put_object(
        self,
        prefix: Prefix,
        total: int,
        wanted: pb.PutObject,
        frames: Iterator[pb.PutFrame],
        response: pb.PutResponse,
    ) -> None:
        self._check(wanted, total)
        kind = Kind(wanted.kind)
        name = ObjectName(prefix.namespace, kind, prefix.chain.prefix_hash(wanted.end_token))
        outcome, header = PutOutcome.EXISTS, None
        if self._catalog.claim(name, wanted.size_bytes):
            outcome, header = self._store(name, wanted, frames)
        if outcome is not PutOutcome.STORED or header is None:
            _drain(frames, wanted.size_bytes)
            response.duplicates += outcome is PutOutcome.EXISTS
            response.dropped += outcome is PutOutcome.FULL
            self._catalog.count("dropped_objects", int(outcome is PutOutcome.FULL))
            return
        self._catalog.admit(prefix, name, wanted.end_token, wanted.size_bytes, header.provenance)
        response.stored += 1
        response.stored_bytes += wanted.size_bytes

    def _store(
        self, name: ObjectName, wanted: pb.PutObject, frames: Iterator[pb.PutFrame]
    ) -> tuple[PutOutcome, Header | None]:
        headers: list[Header] = []

        def fill(view: memoryview) -> None:
            _receive(frames, view)
            header = verify_object(view, name)
            if (header.first_token, header.end_token) != (wanted.first_token, wanted.end_token):
                raise InvalidRequest(
                    f"object holds rows [{header.first_token}, {header.end_token}), "
                    f"announced [{wanted.first_token}, {wanted.end_token})"
                )
            self._catalog.check_geometry(name.namespace, header.geometry)
            headers.append(header)

        outcome = PutOutcome.FULL
        try:
            outcome = self._tiers.put(name, wanted.size_bytes, fill)
            if outcome is PutOutcome.EXISTS and self._tiers.evict([name]):
                # A load from Redis that nobody waited for left it there, unlisted.
                outcome = self._tiers.put(name, wanted.size_bytes, fill)
            while outcome is PutOutcome.FULL and self._catalog.make_room(wanted.size_bytes):
                outcome = self._tiers.put(name, wanted.size_bytes, fill)
        finally:
            if outcome is not PutOutcome.STORED:
                self._catalog.unclaim(name)
        return outcome, headers[0] if headers else None

    def _check(self, wanted: pb.PutObject, total: int) -> None:
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
            raise InvalidRequest(f"object covers [{first}, {end}) of {total} tokens")
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
