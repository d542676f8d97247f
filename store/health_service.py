"""`grpc.health.v1`: whether a server serves.

Not grpcio's own servicer: its Watch takes two locks in either order, so a watcher that leaves while
the server says good-bye stops both for ever (grpcio-health-checking 1.78). There is no Watch here,
which the protocol allows: who wants to know asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

HEALTH_SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    """Serves the health of some services, which is one and the same.

    Args:
        services: their names; the empty one stands for all.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(["", *services])
        # Set once, by the thread that stops the server.
        self._serving = True

    def drain(self) -> None:
        """Says from now on that no new calls should come."""
        self._serving = False

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The health of a service."""
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"service is {request.service!r}, wanted one of {known}"
            )
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._serving else statuses.NOT_SERVING)

    def Watch(self, _: object, context: grpc.ServicerContext) -> NoReturn:
        """Refuses."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered, Check is")
