"""The data lane: changed greetings, requests and objects, on a lane each."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from contextlib import suppress

from fuzz_golden import WAIT_S, Fuzz, WrongHit, check_rows
from google.protobuf.message import DecodeError
from mutations import mutated_bytes
from store_objects import put_frames

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import TailReplayError
from tailreplay.store.lane_tickets import Client as LaneClient
from tailreplay.store.lane_wire import (
    HELLO,
    MAGIC,
    PLACED,
    RECORD_BYTES,
    REQUEST,
    STAGED,
    VERSION,
    RecordKind,
    Request,
    connect,
    receive,
    unpack_record,
)


def lanes(fuzz: Fuzz, frames: int) -> None:
    """The data lane: changed greetings, requests and objects, on a lane each."""
    for _ in range(frames):
        with connect(fuzz.server._lane.address, WAIT_S) as sock:
            fuzz.counts["lane sent"] += 1
            with suppress(ConnectionError, TailReplayError):
                _lane(fuzz, sock)


def _lane(fuzz: Fuzz, sock: socket.socket) -> None:
    ticket = fuzz.server._lane.tickets.issue(LaneClient(), _anyone())
    hello = HELLO.pack(MAGIC, VERSION, 0, ticket)
    if fuzz.rng.random() < 0.1:
        sock.sendall(mutated_bytes(hello, fuzz.rng))
        sock.shutdown(socket.SHUT_WR)
        _drained(sock)
        return
    sock.sendall(hello)
    receive(sock, 1)
    if fuzz.rng.random() < 0.2:
        _staged(fuzz, sock)
        return
    if fuzz.rng.random() < 0.6:
        request = fuzz.fetch_request()
        placed = PLACED * fuzz.rng.randrange(2)
        data = fuzz.changed(request)
        sock.sendall(_head(fuzz, Request.FETCH, placed, len(data)) + data)
        sock.shutdown(socket.SHUT_WR)  # so that a length beyond the data is no wait
        _check_answer(fuzz, sock, data)
        return
    prefix = fuzz.stranger()
    stream = list(put_frames(prefix, prefix.spans()[:3], chunk_bytes=1 << 20))
    plan = pb.PutPlan(begin=stream[0].begin, objects=[f.object for f in stream[1::2]])
    data = fuzz.changed(plan) if fuzz.rng.random() < 0.5 else plan.SerializeToString()
    sock.sendall(_head(fuzz, Request.PUT, 0, len(data)) + data)
    for frame in stream[2::2]:
        sock.sendall(
            mutated_bytes(frame.chunk, fuzz.rng) if fuzz.rng.random() < 0.3 else frame.chunk
        )
    sock.shutdown(socket.SHUT_WR)
    _drained(sock)


def _staged(fuzz: Fuzz, sock: socket.socket) -> None:
    """A put whose objects lie in shared memory: at wrong places, and changed there."""
    sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
    data, descriptors, _, _ = socket.recv_fds(sock, RECORD_BYTES, 1)
    if not descriptors:
        return  # the lane before has not given its memory back yet
    prefix = fuzz.stranger()
    stream = list(put_frames(prefix, prefix.spans()[:3], chunk_bytes=1 << 20))
    plan = pb.PutPlan(begin=stream[0].begin, objects=[f.object for f in stream[1::2]])
    offsets, at = [], 0
    with mmap.mmap(descriptors[0], unpack_record(data).offset) as segment:
        os.close(descriptors[0])
        for frame in stream[2::2]:
            chunk = frame.chunk
            if fuzz.rng.random() < 0.3:
                chunk = mutated_bytes(chunk, fuzz.rng)
            segment[at : at + len(chunk)] = chunk
            offsets.append(at)
            at += len(chunk)
        packed = plan.SerializeToString()
        sock.sendall(_head(fuzz, Request.PUT, STAGED, len(packed)) + packed)
        for offset in offsets:
            place = struct.pack("<Q", offset)
            changed = fuzz.rng.random() < 0.3
            sock.sendall(mutated_bytes(place, fuzz.rng) if changed else place)
        fuzz.counts["lane staged"] += 1
        sock.shutdown(socket.SHUT_WR)
        _drained(sock)


def _head(fuzz: Fuzz, kind: Request, flags: int, size: int) -> bytes:
    head = REQUEST.pack(kind, flags, 0, size)
    return mutated_bytes(head, fuzz.rng) if fuzz.rng.random() < 0.2 else head


def _check_answer(fuzz: Fuzz, sock: socket.socket, data: bytes) -> None:
    """Reads the records of a fetch to their end; the rows in them are those of GOLDEN."""
    while True:
        record = unpack_record(receive(sock, RECORD_BYTES))
        if record.kind is RecordKind.DONE:
            fuzz.counts["lane ok"] += 1
            return
        if record.kind is RecordKind.ERROR:
            fuzz.counts["lane refused"] += 1
            return
        if record.kind is RecordKind.BARRIER:
            return  # no SEEN can be sent any more
        if record.kind is RecordKind.ROWS:
            rows = receive(sock, record.units * record.rows * record.row_bytes)
            if crc32c(rows) != record.crc32c:
                raise WrongHit("a checksum on the lane does not fit")
            with suppress(DecodeError):
                request = pb.FetchRequest.FromString(data)
                check_rows(request, record.number, record, rows)
            fuzz.counts["lane rows"] += 1


def _drained(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def _anyone() -> object:
    from tailreplay.store.auth import ANYONE

    return ANYONE
