"""A Fetch through gRPC, as steps; and what an error of gRPC's says of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from tailreplay.connector.step import step_of
from tailreplay.store.errors import StoreUnavailable, TailReplayError, from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailreplay.connector.breaker import Breaker
    from tailreplay.connector.step import ReportDamage, Step
    from tailreplay.proto import store_pb2 as pb


class FetchStream:
    """Steps of one Fetch through gRPC, in order. One thread iterates; any thread may cancel.

    Args:
        call: the stream.
        breaker: is told how the store did.
        address: of the store, for messages.
        report_damage: as the attribute.

    Attributes:
        report_damage: says of which object rows came damaged.
    """

    def __init__(
        self,
        call: grpc._CallIterator[pb.FetchFrame],
        breaker: Breaker,
        address: str,
        report_damage: ReportDamage,
    ) -> None:
        self._call = call
        self._breaker = breaker
        self._address = address
        self.report_damage = report_damage

    def __iter__(self) -> Iterator[Step]:
        """The steps.

        Raises:
            TailReplayError: the stream broke; what came before is good.
        """
        try:
            yield from map(step_of, self._call)
        except grpc.RpcError as error:
            raise noted(self._breaker, error, self._address) from error
        self._breaker.succeeded()

    def stalled(self) -> None:
        """Ends a stream that brings nothing any more, and counts that against the store."""
        self._breaker.failed()
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream; the store gives its pins back."""
        self._call.cancel()


def noted(breaker: Breaker, error: grpc.RpcError, address: str) -> TailReplayError:
    """The tree's error; only what the store failed at counts against it, no refusal or cancel."""
    ours = from_rpc_error(error, address)
    if not isinstance(ours, StoreUnavailable):
        breaker.succeeded()
    elif not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.CANCELLED:
        breaker.failed()
    return ours
