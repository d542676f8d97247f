"""One run of mutated frames: what the store was given, and what may not come of the rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from mutations import mutated_bytes, mutated_message
from store_objects import Prefix, span_range

from tailreplay.proto import store_pb2 as pb
from tailreplay.store.objects import Kind

if TYPE_CHECKING:
    from tailreplay.store.server import StoreServer

WAIT_S = 60
GOLDEN = Prefix(bytes(range(32)), range(1, 701))
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

    def changed(self, message: object) -> bytes:
        """A message, changed in a field or in its bytes."""
        if self.rng.random() < 0.5:
            return mutated_message(message, self.rng)
        return mutated_bytes(message.SerializeToString(), self.rng)

    def fetch_request(self) -> pb.FetchRequest:
        """Two ranges of GOLDEN."""
        ranges = [
            span_range(Kind.KV, 10, 600, first_unit=1, units=2),
            span_range(Kind.HIDDEN, 65, 300),
            span_range(Kind.CHECKPOINT, 699, 700, prefix_hash=GOLDEN.chain.prefix_hash(700)),
        ]
        leaf = GOLDEN.chain.prefix_hash(700)
        return pb.FetchRequest(
            namespace=GOLDEN.namespace, leaf=leaf, ranges=self.rng.sample(ranges, 2)
        )

    def stranger(self) -> Prefix:
        """A prefix of another namespace, so that GOLDEN's stays as it is."""
        return Prefix(self.rng.randbytes(32), range(self.rng.randrange(1000), 1700))

    def ask(self, call: Callable[..., bytes], data: object, what: str) -> bytes | None:
        """The answer; None when it is refused."""
        try:
            answer = call(data, timeout=WAIT_S)
        except grpc.RpcError as error:
            self.refused(error, what)
            return None
        self.counts[f"{what} ok"] += 1
        return answer

    def refused(self, error: grpc.RpcError, what: str) -> None:
        """Counts a refusal; a fault of the store is none."""
        if error.code() in _FAULTS:
            raise AssertionError(f"{what}: {error.code().name}: {error.details()}") from error
        self.counts[f"{what} refused"] += 1


def check_rows(request: pb.FetchRequest, number: int, rows: object, data: bytes) -> None:
    """Holds rows of a range to those of GOLDEN."""
    if request.namespace != GOLDEN.namespace:
        raise WrongHit("rows for another namespace")
    kind = Kind(request.ranges[number].kind)
    end = rows.first_token + rows.rows
    if bytes(data) != GOLDEN.rows(kind, rows.first_token, end, rows.first_unit, rows.units):
        raise WrongHit(f"rows of {kind.name} from {rows.first_token} are not those stored")
