"""Mutated frames against a running store and its parsers: no crash, no hang, no wrong hit.

    python tests/fuzz_frames.py --frames 1000000 --seed 7

prints one JSON object; the tests run a quick form of it. Everything follows from the seed, but for
how threads are scheduled.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from mutations import mutated_bytes, mutated_message
from store_objects import Prefix, put_frames, span_range
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import IntegrityError, TailReplayError
from tailreplay.store.header import parse_header, verify_object
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
from tailreplay.store.manifest_form import Entry, manifest_key, parsed_manifest
from tailreplay.store.manifest_seal import MARKS, Encrypted
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.redis_envelope import Content, Envelope, Plain, Sealed
from tailreplay.store.sealing import SealingKeys
from tailreplay.store.tokens import from_wire, to_wire

if TYPE_CHECKING:
    from tailreplay.store.server import StoreServer

WAIT_S = 60
KEYS = SealingKeys([bytes(range(32))])
GOLDEN = Prefix(bytes(range(32)), range(1, 701))
_RPCS = {
    "Store": ("OpenLane", "Release", "Stats", "Describe"),
    "Admin": tuple(m.name for m in pb.DESCRIPTOR.services_by_name["Admin"].methods),
}
_FAULTS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)


class WrongHit(AssertionError):
    """The store gave what it was never given."""


@dataclass
class Fuzz:
    """One run.

    Attributes:
        rng: what everything follows from.
        server: what is attacked; has GOLDEN, and nothing else of that namespace.
        counts: frames sent and answers, by part.
    """

    rng: random.Random
    server: StoreServer
    counts: Counter[str] = field(default_factory=Counter)

    def lookups(self, channel: grpc.Channel, frames: int) -> None:
        """Match: the answer is the longest common prefix with what is stored, or a refusal."""
        call = channel.unary_unary("/tailreplay.store.v1.Store/Match")
        golden = pb.MatchRequest(namespace=GOLDEN.namespace, tokens=to_wire(GOLDEN.tokens))
        for _ in range(frames):
            data = self._changed(golden)
            answer = self._ask(call, data, "match")
            if answer is None:
                continue
            found = pb.MatchResponse.FromString(answer)
            request = pb.MatchRequest.FromString(data)
            if found.matched_tokens != _shared(request):
                raise WrongHit(f"matched {found.matched_tokens}, wanted {_shared(request)}")

    def fetches(self, channel: grpc.Channel, frames: int) -> None:
        """Fetch: every row that comes is the one that was stored there."""
        call = channel.unary_stream("/tailreplay.store.v1.Store/Fetch")
        for _ in range(frames):
            data = self._changed(self._fetch_request())
            try:
                for raw in call(data, timeout=WAIT_S):
                    frame = pb.FetchFrame.FromString(raw)
                    if frame.WhichOneof("frame") == "rows":
                        rows = frame.rows
                        if crc32c(rows.data) != rows.crc32c:
                            raise WrongHit("a checksum does not fit")
                        _check_rows(pb.FetchRequest.FromString(data), rows.range, rows, rows.data)
                        self.counts["rows"] += 1
                self.counts["fetch ok"] += 1
            except grpc.RpcError as error:
                self._refused(error, "fetch")

    def puts(self, channel: grpc.Channel, frames: int) -> None:
        """Put: streams of which one frame is changed, left out or sent twice."""
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put")
        sent = 0
        while sent < frames:
            prefix = self._stranger()
            stream = list(put_frames(prefix, chunk_bytes=3000))[: self.rng.randrange(2, 12)]
            wrong = self.rng.randrange(len(stream))
            what = self.rng.random()
            messages = [frame.SerializeToString() for frame in stream]
            if what < 0.1:
                del messages[wrong]
            elif what < 0.2:
                messages.insert(wrong, messages[wrong])
            elif what < 0.3:
                self.rng.shuffle(messages)
            else:
                messages[wrong] = self._changed(stream[wrong])
            sent += len(messages)
            self._ask(call, iter(messages), "put")

    def others(self, channel: grpc.Channel, frames: int, service: str) -> None:
        """Every other RPC of a service."""
        methods = pb.DESCRIPTOR.services_by_name[service].methods_by_name
        for _ in range(frames):
            method = methods[self.rng.choice(_RPCS[service])]
            message = getattr(pb, method.input_type.name)()
            if "namespace" in method.input_type.fields_by_name and self.rng.random() < 0.7:
                message.namespace = GOLDEN.namespace
            if "tokens" in method.input_type.fields_by_name:
                message.tokens.CopyFrom(to_wire(GOLDEN.tokens))
            call = channel.unary_unary(f"/tailreplay.store.v1.{service}/{method.name}")
            self._ask(call, self._changed(message), method.name)

    def lanes(self, frames: int) -> None:
        """The data lane: changed greetings, requests and objects, on a lane each."""
        for _ in range(frames):
            with connect(self.server._lane.address, WAIT_S) as sock:
                self.counts["lane sent"] += 1
                with suppress(ConnectionError, TailReplayError):
                    self._lane(sock)

    def _lane(self, sock: socket.socket) -> None:
        ticket = self.server._lane.tickets.issue(LaneClient(), _anyone())
        hello = HELLO.pack(MAGIC, VERSION, 0, ticket)
        if self.rng.random() < 0.1:
            sock.sendall(mutated_bytes(hello, self.rng))
            sock.shutdown(socket.SHUT_WR)
            _drained(sock)
            return
        sock.sendall(hello)
        receive(sock, 1)
        if self.rng.random() < 0.2:
            self._staged(sock)
            return
        if self.rng.random() < 0.6:
            request = self._fetch_request()
            placed = PLACED * self.rng.randrange(2)
            data = self._changed(request)
            sock.sendall(self._head(Request.FETCH, placed, len(data)) + data)
            sock.shutdown(socket.SHUT_WR)  # so that a length beyond the data is no wait
            self._check_answer(sock, data)
            return
        prefix = self._stranger()
        stream = list(put_frames(prefix, prefix.spans()[:3], chunk_bytes=1 << 20))
        plan = pb.PutPlan(begin=stream[0].begin, objects=[f.object for f in stream[1::2]])
        data = self._changed(plan) if self.rng.random() < 0.5 else plan.SerializeToString()
        sock.sendall(self._head(Request.PUT, 0, len(data)) + data)
        for frame in stream[2::2]:
            sock.sendall(
                mutated_bytes(frame.chunk, self.rng) if self.rng.random() < 0.3 else frame.chunk
            )
        sock.shutdown(socket.SHUT_WR)
        _drained(sock)

    def _staged(self, sock: socket.socket) -> None:
        """A put whose objects lie in shared memory: at wrong places, and changed there."""
        sock.sendall(REQUEST.pack(Request.STAGE, 0, 0, 0))
        data, descriptors, _, _ = socket.recv_fds(sock, RECORD_BYTES, 1)
        if not descriptors:
            return  # the lane before has not given its memory back yet
        prefix = self._stranger()
        stream = list(put_frames(prefix, prefix.spans()[:3], chunk_bytes=1 << 20))
        plan = pb.PutPlan(begin=stream[0].begin, objects=[f.object for f in stream[1::2]])
        offsets, at = [], 0
        with mmap.mmap(descriptors[0], unpack_record(data).offset) as segment:
            os.close(descriptors[0])
            for frame in stream[2::2]:
                chunk = frame.chunk
                if self.rng.random() < 0.3:
                    chunk = mutated_bytes(chunk, self.rng)
                segment[at : at + len(chunk)] = chunk
                offsets.append(at)
                at += len(chunk)
            packed = plan.SerializeToString()
            sock.sendall(self._head(Request.PUT, STAGED, len(packed)) + packed)
            for offset in offsets:
                place = struct.pack("<Q", offset)
                changed = self.rng.random() < 0.3
                sock.sendall(mutated_bytes(place, self.rng) if changed else place)
            self.counts["lane staged"] += 1
            sock.shutdown(socket.SHUT_WR)
            _drained(sock)

    def _head(self, kind: Request, flags: int, size: int) -> bytes:
        head = REQUEST.pack(kind, flags, 0, size)
        return mutated_bytes(head, self.rng) if self.rng.random() < 0.2 else head

    def _check_answer(self, sock: socket.socket, data: bytes) -> None:
        """Reads the records of a fetch to their end; the rows in them are those of GOLDEN."""
        while True:
            record = unpack_record(receive(sock, RECORD_BYTES))
            if record.kind is RecordKind.DONE:
                self.counts["lane ok"] += 1
                return
            if record.kind is RecordKind.ERROR:
                self.counts["lane refused"] += 1
                return
            if record.kind is RecordKind.BARRIER:
                return  # no SEEN can be sent any more
            if record.kind is RecordKind.ROWS:
                rows = receive(sock, record.units * record.rows * record.row_bytes)
                if crc32c(rows) != record.crc32c:
                    raise WrongHit("a checksum on the lane does not fit")
                with suppress(DecodeError):
                    request = pb.FetchRequest.FromString(data)
                    _check_rows(request, record.number, record, rows)
                self.counts["lane rows"] += 1

    def headers(self, frames: int) -> None:
        """Stored objects: a change is seen, wherever it is."""
        objects = [(span, GOLDEN.object(*span)) for span in GOLDEN.spans()]
        others = [data for _, data in objects]
        for _ in range(frames):
            (kind, _, end), data = self.rng.choice(objects)
            changed = mutated_bytes(data, self.rng, others)
            self.counts["headers sent"] += 1
            with suppress(IntegrityError):
                parse_header(changed)
            try:
                verify_object(memoryview(changed), GOLDEN.name(kind, end))
            except IntegrityError:
                continue
            if changed != data:
                raise WrongHit("a changed object passes for the one that was stored")

    def envelopes(self, frames: int) -> None:
        """Values of Redis, plain and sealed: a change of value or key is seen."""
        payload = GOLDEN.object(Kind.HIDDEN, 64, 128)
        key = b"model|kv@00000000@1@" + bytes(range(32))
        for envelope in (Plain(), Sealed(KEYS)):
            value = b"".join(envelope.wrap(key, memoryview(payload)))
            for _ in range(frames // 2):
                changed, name = mutated_bytes(value, self.rng), key
                if self.rng.random() < 0.2:
                    changed, name = value, mutated_bytes(key, self.rng)
                self.counts["envelopes sent"] += 1
                if is_intact(envelope, name, changed, len(payload)) and (changed, name) != (
                    value,
                    key,
                ):
                    raise WrongHit("a changed value passes for the one that was stored")

    def manifests(self, frames: int) -> None:
        """Manifests: a change is a miss of that field, and what a forger marks is still parsed."""
        names = GOLDEN.namespace + GOLDEN.chain.prefix_hash(256)
        key = manifest_key("tailreplay:", GOLDEN.namespace, GOLDEN.chain.prefix_hash(256))
        plain = _manifest_fields()
        for seal in (MARKS, Encrypted(KEYS)):
            good = {f: seal.wrap(key, f, v) for f, v in plain.items()}
            wanted = parsed_manifest(key, names, good, seal)
            if wanted is None or len(wanted[1]) != len(plain) - 1:
                raise AssertionError("the golden manifest can not be read")
            for _ in range(frames // 4):
                self.counts["manifests sent"] += 2
                name = self.rng.choice(list(plain))
                value = mutated_bytes(plain[name], self.rng, list(plain.values()))
                forged = good | {name: seal.wrap(key, name, value)}
                parsed_manifest(key, names, forged, seal)
                value = mutated_bytes(good[name], self.rng, list(good.values()))
                found = parsed_manifest(key, names, good | {name: value}, seal)
                lost = [e for e in wanted[1] if e.field != name.decode()]
                if found is not None and value != good[name] and found != (wanted[0], lost):
                    raise WrongHit(f"a changed field {name!r} is believed")

    def assert_well(self, channel: grpc.Channel) -> None:
        """The store is as before: all of GOLDEN is there, and nothing is held."""
        call = channel.unary_unary(
            "/tailreplay.store.v1.Store/Match",
            pb.MatchRequest.SerializeToString,
            pb.MatchResponse.FromString,
        )
        request = pb.MatchRequest(namespace=GOLDEN.namespace, tokens=to_wire(GOLDEN.tokens))
        assert call(request, timeout=WAIT_S).matched_tokens == 700
        store = self.server.store
        until(
            lambda: not (len(store.leases) or store.tiers.pinned_bytes or store.catalog._claims),
            WAIT_S,
        )

    def _changed(self, message: object) -> bytes:
        if self.rng.random() < 0.5:
            return mutated_message(message, self.rng)
        return mutated_bytes(message.SerializeToString(), self.rng)

    def _fetch_request(self) -> pb.FetchRequest:
        ranges = [
            span_range(Kind.KV, 10, 600, first_unit=1, units=2),
            span_range(Kind.HIDDEN, 65, 300),
            span_range(Kind.CHECKPOINT, 699, 700, prefix_hash=GOLDEN.chain.prefix_hash(700)),
        ]
        leaf = GOLDEN.chain.prefix_hash(700)
        return pb.FetchRequest(
            namespace=GOLDEN.namespace, leaf=leaf, ranges=self.rng.sample(ranges, 2)
        )

    def _stranger(self) -> Prefix:
        """A prefix of another namespace, so that GOLDEN's stays as it is."""
        return Prefix(self.rng.randbytes(32), range(self.rng.randrange(1000), 1700))

    def _ask(self, call: Callable[..., bytes], data: object, what: str) -> bytes | None:
        try:
            answer = call(data, timeout=WAIT_S)
        except grpc.RpcError as error:
            self._refused(error, what)
            return None
        self.counts[f"{what} ok"] += 1
        return answer

    def _refused(self, error: grpc.RpcError, what: str) -> None:
        if error.code() in _FAULTS:
            raise AssertionError(f"{what}: {error.code().name}: {error.details()}") from error
        self.counts[f"{what} refused"] += 1


def is_intact(envelope: Envelope, key: bytes, value: bytes, payload_bytes: int) -> bool:
    """Whether a reader takes a value for what was stored under a key."""
    payload = memoryview(bytearray(payload_bytes))
    room = envelope.room(payload)
    if len(value) != sum(map(len, room)):
        return False  # as the connection says before anything is read
    at = 0
    for part in room:
        part[:] = value[at : at + len(part)]
        at += len(part)
    return envelope.unwrap(key, room, payload) is Content.GOOD


def _shared(request: pb.MatchRequest) -> int:
    """Tokens that a request shares with GOLDEN."""
    if request.namespace != GOLDEN.namespace:
        return 0
    tokens = from_wire(request.tokens)
    size = min(len(tokens), len(GOLDEN))
    differs = np.flatnonzero(tokens[:size] != GOLDEN.tokens[:size])
    return int(differs[0]) if len(differs) else size


def _check_rows(request: pb.FetchRequest, number: int, rows: object, data: bytes) -> None:
    if request.namespace != GOLDEN.namespace:
        raise WrongHit("rows for another namespace")
    kind = Kind(request.ranges[number].kind)
    end = rows.first_token + rows.rows
    if bytes(data) != GOLDEN.rows(kind, rows.first_token, end, rows.first_unit, rows.units):
        raise WrongHit(f"rows of {kind.name} from {rows.first_token} are not those stored")


def _manifest_fields() -> dict[bytes, bytes]:
    """A manifest's values without their seals, made by the store's own packing."""
    from tailreplay.store.manifest_form import pack_block, pack_entry
    from tailreplay.store.views import Block

    hash_at = GOLDEN.chain.prefix_hash
    pages = tuple(hash_at(end) for end in (64, 128, 192, 256))
    block = Block(GOLDEN.namespace, hash_at(256), hash_at(0), 0, GOLDEN.digests[: 256 * 8], pages)
    digest = GOLDEN.digests[299 * 8 : 300 * 8]
    entries = [
        Entry("k", 4000, Provenance.EXACT),
        Entry("2", 900, Provenance.EXACT, tail_figures=bytes(range(12))),
        Entry(f"c300:{digest.hex()}", 77, Provenance.APPROXIMATE, hash_at(300)),
    ]
    return {b"b": pack_block(block)} | {e.field.encode(): pack_entry(e) for e in entries}


def _drained(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def _anyone() -> object:
    from tailreplay.store.auth import ANYONE

    return ANYONE


class _Errors(logging.Handler):
    """Keeps what the store logs as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextmanager
def _no_failures() -> Iterator[None]:
    handler = _Errors()
    names = ("tailreplay", "grpc")
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
    # A message that is no message is refused by gRPC itself, which logs that as a failure.
    ours = [text for text in handler.found if "deserializing" not in text]
    assert not ours, ours[:3]


def run(frames: int, seed: int) -> dict[str, object]:
    """Sends about so many frames; returns what became of them.

    Raises:
        AssertionError: the store failed, hung, or gave what it was never given.
    """
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
    from tailreplay.store import serve_in_thread

    started_s = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(
            serve_in_thread(
                pool_bytes=32 << 20,
                staging_bytes=1 << 20,
                stall_limit_s=WAIT_S,
                put_stall_limit_s=WAIT_S,
            )
        )
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        stack.enter_context(_no_failures())
        call = channel.stream_unary("/tailreplay.store.v1.Store/Put", pb.PutFrame.SerializeToString)
        call(put_frames(GOLDEN), timeout=WAIT_S)
        fuzz = Fuzz(random.Random(seed), server)
        share = frames // 20
        fuzz.lookups(channel, 3 * share)
        fuzz.fetches(channel, 2 * share)
        fuzz.lanes(2 * share)
        fuzz.puts(channel, 4 * share)
        fuzz.others(channel, share, "Store")
        fuzz.headers(3 * share)
        fuzz.envelopes(2 * share)
        fuzz.manifests(2 * share)
        fuzz.assert_well(channel)
        fuzz.others(channel, share, "Admin")  # what they take away is theirs to take
    return {
        "frames": 20 * share,
        "seed": seed,
        "seconds": round(time.monotonic() - started_s, 1),
        **dict(sorted(fuzz.counts.items())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(run(given.frames, given.seed), indent=2))  # noqa: T201
