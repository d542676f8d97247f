"""An object on its way from an engine to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.header import Header, build_parts, object_bytes
from tailreplay.store.objects import ObjectName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.chain import PrefixChain
    from tailreplay.store.geometry import Geometry


def outgoing(
    namespace: bytes,
    chain: PrefixChain,
    geometry: Geometry,
    span: tuple[int, int],
    pack: Callable[[], memoryview | Sequence[memoryview]],
    tail_figures: bytes = b"",
) -> ObjectBytes:
    """Announces an exact object, which is packed only when the store wants it.

    Args:
        namespace: 32 bytes.
        chain: names the prompt's prefixes.
        geometry: of the object; gives its kind.
        span: tokens [first, end) that it covers; of a checkpoint the last it has seen.
        pack: gives the payload of those rows, or its units in parts; called at most once.
        tail_figures: of a hidden object; may be empty.
    """
    first, end = span
    name = ObjectName(namespace, geometry.kind, chain.prefix_hash(end))
    header = Header(name, geometry, first, end - first, ())
    announce = pb.PutObject(
        kind=pb.Kind.ValueType(geometry.kind),
        first_token=first,
        end_token=end,
        size_bytes=object_bytes(geometry, header.rows),
        tail_figures=tail_figures,
    )

    def parts() -> Sequence[memoryview]:
        packed = pack()
        return build_parts(header, [packed] if isinstance(packed, memoryview) else packed)

    return ObjectBytes(announce, parts)
