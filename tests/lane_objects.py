"""Objects of a prefix through the connector's client, over whichever plane it takes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from store_objects import Prefix, Span, put_frames

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.objects import Kind

WAIT_S = 20
POISON = 0xA5


def objects(
    prefix: Prefix, spans: Iterable[Span] | None = None, packed: list | None = None, **how
) -> list[ObjectBytes]:
    """Objects of a prefix; notes in `packed` which were asked for their bytes."""
    found = []
    for frame in list(put_frames(prefix, spans, chunk_bytes=1 << 30, **how))[1:]:
        if frame.WhichOneof("frame") == "object":
            announce = frame.object
            continue

        def parts(chunk=frame.chunk, announce=announce):
            if packed is not None:
                packed.append((announce.kind, announce.first_token))
            return [chunk[:100], chunk[100:]]

        found.append(ObjectBytes(announce, parts))
    return found


def put(client: StoreClient, prefix: Prefix, **how) -> pb.PutResponse:
    return client.put(prefix.namespace, prefix.tokens, objects(prefix, **how), timeout_s=WAIT_S)


def fetch(client: StoreClient, prefix: Prefix, *ranges: pb.Range):
    """Bytes of each range, put together from steps, in buffers poisoned before; and their ends."""
    leaf = client.match(prefix.namespace, prefix.tokens).leaf
    stream = client.fetch(prefix.namespace, leaf, ranges, timeout_s=WAIT_S)
    buffers = []
    for wanted in ranges:
        geometry = prefix.geometry[Kind(wanted.kind)]
        rows = wanted.end_token - wanted.first_token
        shape = (wanted.units or geometry.units, rows, geometry.row_bytes)
        buffers.append(np.full(shape, POISON, np.uint8))
    ends = []
    for record, fill in stream:
        if record.kind is RecordKind.ROWS:
            wanted = ranges[record.number]
            unit = record.first_unit - wanted.first_unit
            row = record.first_token - wanted.first_token
            fill(buffers[record.number][unit : unit + record.units, row : row + record.rows])
        elif record.kind in (RecordKind.RANGE_END, RecordKind.MISSING):
            ends.append((record.kind, record.number))
    return [buffer.tobytes() for buffer in buffers], ends


def rows_of(prefix: Prefix, wanted: pb.Range) -> bytes:
    """What a range must bring."""
    units = wanted.units or None
    return prefix.rows(
        Kind(wanted.kind), wanted.first_token, wanted.end_token, wanted.first_unit, units
    )
