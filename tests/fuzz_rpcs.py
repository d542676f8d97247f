"""Mutated calls over gRPC: every answer is right, or a refusal."""

from __future__ import annotations

import grpc
import numpy as np
from fuzz_golden import GOLDEN, WAIT_S, Fuzz, WrongHit, check_rows
from store_objects import put_frames
from waiting import until

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.checksum import crc32c
from tailreplay.store.tokens import from_wire, to_wire

_RPCS = {
    "Store": ("OpenLane", "Release", "ReportDamage", "Stats", "Describe"),
    "Admin": tuple(m.name for m in pb.DESCRIPTOR.services_by_name["Admin"].methods),
}


def lookups(fuzz: Fuzz, channel: grpc.Channel, frames: int) -> None:
    """Match: the answer is the longest common prefix with what is stored, or a refusal."""
    call = channel.unary_unary("/tailreplay.store.v1.Store/Match")
    golden = pb.MatchRequest(namespace=GOLDEN.namespace, tokens=to_wire(GOLDEN.tokens))
    for _ in range(frames):
        data = fuzz.changed(golden)
        answer = fuzz.ask(call, data, "match")
        if answer is None:
            continue
        found = pb.MatchResponse.FromString(answer)
        request = pb.MatchRequest.FromString(data)
        if found.matched_tokens != _shared(request):
            raise WrongHit(f"matched {found.matched_tokens}, wanted {_shared(request)}")


def fetches(fuzz: Fuzz, channel: grpc.Channel, frames: int) -> None:
    """Fetch: every row that comes is the one that was stored there."""
    call = channel.unary_stream("/tailreplay.store.v1.Store/Fetch")
    for _ in range(frames):
        data = fuzz.changed(fuzz.fetch_request())
        try:
            for raw in call(data, timeout=WAIT_S):
                frame = pb.FetchFrame.FromString(raw)
                if frame.WhichOneof("frame") == "rows":
                    rows = frame.rows
                    if crc32c(rows.data) != rows.crc32c:
                        raise WrongHit("a checksum does not fit")
                    check_rows(pb.FetchRequest.FromString(data), rows.range, rows, rows.data)
                    fuzz.counts["rows"] += 1
            fuzz.counts["fetch ok"] += 1
        except grpc.RpcError as error:
            fuzz.refused(error, "fetch")


def puts(fuzz: Fuzz, channel: grpc.Channel, frames: int) -> None:
    """Put: streams of which one frame is changed, left out or sent twice."""
    call = channel.stream_unary("/tailreplay.store.v1.Store/Put")
    sent = 0
    while sent < frames:
        prefix = fuzz.stranger()
        stream = list(put_frames(prefix, chunk_bytes=3000))[: fuzz.rng.randrange(2, 12)]
        wrong = fuzz.rng.randrange(len(stream))
        what = fuzz.rng.random()
        messages = [frame.SerializeToString() for frame in stream]
        if what < 0.1:
            del messages[wrong]
        elif what < 0.2:
            messages.insert(wrong, messages[wrong])
        elif what < 0.3:
            fuzz.rng.shuffle(messages)
        else:
            messages[wrong] = fuzz.changed(stream[wrong])
        sent += len(messages)
        fuzz.ask(call, iter(messages), "put")


def others(fuzz: Fuzz, channel: grpc.Channel, frames: int, service: str) -> None:
    """Every other RPC of a service."""
    methods = pb.DESCRIPTOR.services_by_name[service].methods_by_name
    for _ in range(frames):
        method = methods[fuzz.rng.choice(_RPCS[service])]
        message = getattr(pb, method.input_type.name)()
        if "namespace" in method.input_type.fields_by_name and fuzz.rng.random() < 0.7:
            message.namespace = GOLDEN.namespace
        if "tokens" in method.input_type.fields_by_name:
            message.tokens.CopyFrom(to_wire(GOLDEN.tokens))
        if method.name == "ReportDamage":  # a lie, since all of it is whole
            message.leaf, message.kind = GOLDEN.chain.prefix_hash(700), pb.KIND_KV
            message.prefix_hash = GOLDEN.chain.prefix_hash(256)
        call = channel.unary_unary(f"/tailreplay.store.v1.{service}/{method.name}")
        fuzz.ask(call, fuzz.changed(message), method.name)


def assert_well(fuzz: Fuzz, channel: grpc.Channel) -> None:
    """The store is as before: all of GOLDEN is there, and nothing is held."""
    call = channel.unary_unary(
        "/tailreplay.store.v1.Store/Match",
        pb.MatchRequest.SerializeToString,
        pb.MatchResponse.FromString,
    )
    request = pb.MatchRequest(namespace=GOLDEN.namespace, tokens=to_wire(GOLDEN.tokens))
    assert call(request, timeout=WAIT_S).matched_tokens == 700
    store = fuzz.server.store
    until(
        lambda: not (len(store.leases) or store.tiers.pinned_bytes or store.catalog._claims),
        WAIT_S,
    )


def _shared(request: pb.MatchRequest) -> int:
    """Tokens that a request shares with GOLDEN."""
    if request.namespace != GOLDEN.namespace:
        return 0
    tokens = from_wire(request.tokens)
    size = min(len(tokens), len(GOLDEN))
    differs = np.flatnonzero(tokens[:size] != GOLDEN.tokens[:size])
    return int(differs[0]) if len(differs) else size
