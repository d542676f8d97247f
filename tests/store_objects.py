"""Objects whose every byte tells which prefix it belongs to, and a client straight on the stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import numpy as np

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.chain import PrefixChain, digest_key, sealed_tokens
from tailreplay.store.checksum import crc32c
from tailreplay.store.geometry import (
    Dtype,
    Geometry,
    checkpoint_geometry,
    hidden_geometry,
    kv_geometry,
)
from tailreplay.store.header import Header, build_parts
from tailreplay.store.objects import BLOCK_TOKENS, Kind, ObjectName, Provenance
from tailreplay.store.prompt import Prompt
from tailreplay.store.tokens import extended_tokens, to_wire

if TYPE_CHECKING:
    from tailreplay.store.tokens import ExtendedTokens

GEOMETRY = {
    Kind.KV: kv_geometry(fa_layers=2, kv_heads=2, head_dim=4, dtype=Dtype.FLOAT32),
    Kind.HIDDEN: hidden_geometry(sources=2, hidden_size=8, dtype=Dtype.FLOAT32),
    Kind.CHECKPOINT: checkpoint_geometry(
        shape=(3, 2, 1, 4, 4, 3), dtype=Dtype.FLOAT32, state_dtype=Dtype.FLOAT32
    ),
}

Span = tuple[Kind, int, int]
"""An object or a range: kind, first token, end token."""


def running_digests(key: bytes, tokens: ExtendedTokens) -> bytes:
    """One 8-byte digest per token, back to back, each over the prefix up to it."""
    return sealed_tokens(key, tokens)[:, 0].tobytes()


class Prefix:
    """A token sequence, and what a model would store for it: rows that depend on all before them.

    Args:
        namespace: 32 bytes.
        ids: its tokens.
        geometry: of each kind.
        tenant: digest of the tenant whose it is.
    """

    def __init__(
        self,
        namespace: bytes,
        ids: Sequence[int],
        geometry: dict[Kind, Geometry] = GEOMETRY,
        tenant: bytes = b"",
    ) -> None:
        self.namespace = namespace
        self.tenant = tenant
        self.ids = list(ids)
        self.geometry = geometry
        wide = {at: token for at, token in enumerate(self.ids) if token >> 32}
        self.tokens = extended_tokens(
            [0 if at in wide else t for at, t in enumerate(self.ids)], wide
        )
        self.chain = PrefixChain(namespace, self.tokens)
        self.digests = running_digests(digest_key(namespace), self.tokens)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> Prompt:
        """As a request brings it."""
        return Prompt(self.namespace, self.tokens, digest_key(self.namespace))

    def name(self, kind: Kind, end_token: int) -> ObjectName:
        return ObjectName(self.namespace, kind, self.chain.prefix_hash(end_token))

    def rows(
        self, kind: Kind, first: int, end: int, first_unit: int = 0, units: int | None = None
    ) -> bytes:
        """Rows [first, end) of some units, unit-major."""
        geometry = self.geometry[kind]
        units = geometry.units - first_unit if units is None else units
        seen = np.frombuffer(self.digests, "<u8")[first:end]
        unit = np.arange(first_unit, first_unit + units, dtype=np.uint64)
        word = np.arange(geometry.row_bytes // 8, dtype=np.uint64)
        salt = (
            unit[:, None, None] * np.uint64(1_000_003) + word * np.uint64(8_191) + np.uint64(kind)
        )
        return (seen[None, :, None] ^ (salt * np.uint64(0x9E3779B97F4A7C15))).tobytes()

    def object(self, kind: Kind, first: int, end: int, **header: object) -> bytes:
        """The stored object of those rows."""
        empty = Header(self.name(kind, end), self.geometry[kind], first, end - first, (), **header)
        return b"".join(build_parts(empty, [self.rows(kind, first, end)]))

    def spans(self, *kinds: Kind, until: int | None = None) -> list[Span]:
        """All objects of some kinds; a checkpoint at the end alone."""
        until = len(self) if until is None else until
        spans: list[Span] = []
        for kind in kinds or tuple(Kind):
            if kind is Kind.CHECKPOINT:
                spans.append((kind, len(self) - 1, len(self)))
                continue
            step = BLOCK_TOKENS[kind]
            spans += [(kind, at, min(at + step, len(self))) for at in range(0, until, step)]
        return spans


def put_frames(
    prefix: Prefix,
    spans: Iterable[Span] | None = None,
    *,
    chunk_bytes: int = 1 << 20,
    make: Callable[[Span], bytes] | None = None,
    provenance: Provenance = Provenance.EXACT,
    figures: Callable[[Span], bytes] = lambda _: b"",
) -> Iterator[pb.PutFrame]:
    """The frames that store some objects of a prefix; all of them by default.

    Args:
        prefix: whose.
        spans: which objects.
        chunk_bytes: size of a chunk.
        make: gives an object's bytes where they are not what they should be.
        provenance: in the headers.
        figures: gives an object's tail figures.
    """
    begin = pb.PutBegin(
        namespace=prefix.namespace, tokens=to_wire(prefix.tokens), tenant=prefix.tenant
    )
    yield pb.PutFrame(begin=begin)
    for span in prefix.spans() if spans is None else spans:
        data = make(span) if make else prefix.object(*span, provenance=provenance)
        kind, first, end = span
        yield pb.PutFrame(
            object=pb.PutObject(
                kind=kind,
                first_token=first,
                end_token=end,
                size_bytes=len(data),
                tail_figures=figures(span),
            )
        )
        for at in range(0, len(data), chunk_bytes):
            yield pb.PutFrame(chunk=data[at : at + chunk_bytes])


@dataclass
class Fetched:
    """What a Fetch stream brought.

    Attributes:
        rows: bytes of each range, unit-major, as `Prefix.rows` gives them.
        missing: of each range that ended with Missing.
        order: numbers of the ranges as their frames came, runs of one number collapsed.
        frames: Rows frames as they came.
        ended: ranges with RangeEnd.
    """

    rows: dict[int, bytes] = field(default_factory=dict)
    missing: dict[int, pb.Missing] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    frames: list[pb.Rows] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def take(self, frame: pb.FetchFrame) -> None:
        which = frame.WhichOneof("frame")
        if which == "lease":
            return
        number = getattr(frame, which).range
        if self.order[-1:] != [number]:
            self.order.append(number)
        if which == "rows":
            assert crc32c(frame.rows.data) == frame.rows.crc32c
            self.frames.append(frame.rows)
        elif which == "missing":
            self.missing[number] = frame.missing
        else:
            self.ended.append(number)

    def assemble(self) -> Fetched:
        """Puts the rows of every range together; frames may cut it by units and by tokens."""
        for number in {frame.range for frame in self.frames}:
            units: dict[int, dict[int, bytes]] = {}
            for frame in (f for f in self.frames if f.range == number):
                unit_bytes = frame.rows * frame.row_bytes
                assert len(frame.data) == frame.units * unit_bytes
                for i in range(frame.units):
                    part = frame.data[i * unit_bytes : (i + 1) * unit_bytes]
                    units.setdefault(frame.first_unit + i, {})[frame.first_token] = part
            self.rows[number] = b"".join(
                b"".join(parts[token] for token in sorted(parts))
                for _, parts in sorted(units.items())
            )
        return self


class Client:
    """Plain calls to a store; a deadline on each."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = rpc.StoreStub(self.channel)
        self._admin_channel = grpc.insecure_channel(f"{address}.admin")
        self.admin = rpc.AdminStub(self._admin_channel)

    def close(self) -> None:
        self.channel.close()
        self._admin_channel.close()

    def put(self, prefix: Prefix, spans: Iterable[Span] | None = None, **how) -> pb.PutResponse:
        return self.stub.Put(put_frames(prefix, spans, **how), timeout=20)

    def match(self, prefix: Prefix) -> pb.MatchResponse:
        request = pb.MatchRequest(namespace=prefix.namespace, tokens=to_wire(prefix.tokens))
        return self.stub.Match(request, timeout=20)

    def fetch(self, prefix: Prefix, *ranges: pb.Range, leaf: bytes | None = None) -> Fetched:
        """Fetches along the longest stored prefix, or along `leaf`."""
        fetched = Fetched()
        for frame in self.open_fetch(prefix, *ranges, leaf=leaf):
            fetched.take(frame)
        return fetched.assemble()

    def open_fetch(self, prefix: Prefix, *ranges: pb.Range, leaf: bytes | None = None):
        leaf = self.match(prefix).leaf if leaf is None else leaf
        request = pb.FetchRequest(namespace=prefix.namespace, leaf=leaf, ranges=ranges)
        return self.stub.Fetch(request, timeout=20)

    def release(self, lease_id: bytes) -> None:
        self.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=20)

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest(), timeout=20)


def span_range(kind: Kind, first: int, end: int, **more: object) -> pb.Range:
    return pb.Range(kind=kind, first_token=first, end_token=end, **more)


def runs_of(answer: pb.MatchResponse, kind: Kind) -> list[tuple[int, int]]:
    return [(run.first_token, run.end_token) for run in answer.runs if run.kind == kind]
