"""Clients with credentials, that put and fetch one prefix."""

from contextlib import contextmanager

import numpy as np
from store_objects import Prefix, put_frames, span_range

from tailreplay.connector.client import StoreClient
from tailreplay.connector.lane_stream import LaneStream
from tailreplay.connector.put_frames import ObjectBytes
from tailreplay.store.lane_wire import (
    RecordKind,
)
from tailreplay.store.objects import Kind

WAIT_S = 20
PREFIX = Prefix(bytes(range(32)), range(1, 301))


@contextmanager
def client_of(address, credentials, **how):
    with StoreClient(
        address, credentials=credentials, match_timeout_s=WAIT_S, call_timeout_s=WAIT_S, **how
    ) as client:
        yield client


def put(client, prefix=PREFIX):
    frames = list(put_frames(prefix, chunk_bytes=1 << 30))[1:]
    objects = [
        ObjectBytes(a.object, [b.chunk]) for a, b in zip(frames[::2], frames[1::2], strict=True)
    ]
    return client.put(prefix.namespace, prefix.tokens, objects, timeout_s=WAIT_S)


def fetch(client, prefix=PREFIX, leaf=None):
    """The bytes of its keys and values, and the kinds of records that came."""
    leaf = client.match(prefix.namespace, prefix.tokens).leaf if leaf is None else leaf
    wanted = span_range(Kind.KV, 0, len(prefix))
    geometry = prefix.geometry[Kind.KV]
    rows = bytearray(geometry.payload_bytes(len(prefix)))
    whole = np.frombuffer(rows, np.uint8).reshape(geometry.units, len(prefix), geometry.row_bytes)
    kinds = []
    stream = client.fetch(prefix.namespace, leaf, [wanted], timeout_s=WAIT_S)
    for record, fill in stream:
        kinds.append(record.kind)
        if record.kind is RecordKind.ROWS:
            at = np.s_[
                record.first_unit : record.first_unit + record.units,
                record.first_token : record.first_token + record.rows,
            ]
            fill(whole[at])
    return bytes(rows), kinds, isinstance(stream, LaneStream)
