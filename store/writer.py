"""Put: takes objects of one prefix, checks every byte once, and lists them last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store import tokens as wire_tokens
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.prompt import Prompt
from tailreplay.store.put_session import PutSession
from tailreplay.store.put_source import FrameSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailreplay.proto import store_pb2 as pb
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
        source = FrameSource(frames)
        with self.open(first.begin, owned(first.begin)) as session:
            for frame in frames:
                if frame.WhichOneof("frame") != "object":
                    raise InvalidRequest(f"got `{frame.WhichOneof('frame')}`, wanted `object`")
                if session.claim(frame.object):
                    session.store([frame.object], source)
                else:
                    source.skip(frame.object.size_bytes)
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
