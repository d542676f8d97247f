"""Prefixes put into a store without its wire, and what it says of them."""

from store_objects import GEOMETRY, Prefix, put_frames

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.core import Store
from tailreplay.store.header import object_bytes
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind
from tailreplay.store.tokens import to_wire

MIB = 1 << 20
BASE = list(range(1024))
KV, HIDDEN, CHECKPOINT = Kind
BLOCK_BYTES = object_bytes(GEOMETRY[KV], 256)


def put(store: Store, prefix: Prefix, *kinds: Kind) -> None:
    answer = store.put(put_frames(prefix, prefix.spans(*kinds)), lambda: None)
    assert answer.dropped == 0


def match(store: Store, prefix: Prefix) -> pb.MatchResponse:
    return store.match(pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens)))


def fetch(store: Store, prefix: Prefix, *ranges: pb.Range) -> None:
    leaf = match(store, prefix).leaf
    request = pb.FetchRequest(namespace=prefix.namespace, leaf=leaf, ranges=ranges)
    assert not [
        f for f in store.fetch(request, lambda: None) if f.record.kind is RecordKind.MISSING
    ]


def two(space: bytes) -> tuple[Prefix, Prefix]:
    return Prefix(space, BASE), Prefix(space, [7, *BASE[1:]])
