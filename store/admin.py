"""The Admin service: one method per RPC, errors of the tree as statuses, nothing decided here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.auth import Role, allow
from tailreplay.store.errors import TailReplayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from tailreplay.store.administration import Administration
    from tailreplay.store.auth import Access
    from tailreplay.store.core import Store

ADMIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name


def add_admin(server: grpc.Server, store: Store, access: Access) -> None:
    """Lets operators at a store through a server.

    Args:
        server: to register on; without a token file, who reaches it is an operator.
        store: the store.
        access: says whose token a call has; only administrators' will do.
    """
    rpc.add_AdminServicer_to_server(AdminService(store.admin, access), server)


class AdminService(rpc.AdminServicer):
    """Serves one store's operators; called from the server's worker threads.

    Args:
        admin: what to serve; its owner closes it.
        access: as in `add_admin`.
    """

    def __init__(self, admin: Administration, access: Access) -> None:
        self._admin = admin
        self._access = access

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinInfo:
        """Keeps a prefix in the CPU tier."""
        with self._admitted(context):
            return self._admin.operators.pin(request)

    def Unpin(self, request: pb.UnpinRequest, context: grpc.ServicerContext) -> pb.UnpinResponse:
        """Ends a pin."""
        with self._admitted(context):
            return self._admin.operators.unpin(request)

    def ListPins(
        self, request: pb.ListPinsRequest, context: grpc.ServicerContext
    ) -> pb.ListPinsResponse:
        """The pins there are."""
        with self._admitted(context):
            return self._admin.operators.list_pins()

    def SetQuota(self, request: pb.SetQuotaRequest, context: grpc.ServicerContext) -> pb.TenantInfo:
        """Limits a tenant."""
        with self._admitted(context):
            return self._admin.operators.set_quota(request)

    def DeleteQuota(
        self, request: pb.DeleteQuotaRequest, context: grpc.ServicerContext
    ) -> pb.TenantInfo:
        """Takes a tenant's limits away."""
        with self._admitted(context):
            return self._admin.operators.delete_quota(request)

    def ListTenants(
        self, request: pb.ListTenantsRequest, context: grpc.ServicerContext
    ) -> pb.ListTenantsResponse:
        """Use and limits."""
        with self._admitted(context):
            return self._admin.operators.list_tenants(request)

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearResponse:
        """Forgets objects."""
        with self._admitted(context):
            return self._admin.forgetter.clear(request)

    def Erase(self, request: pb.EraseRequest, context: grpc.ServicerContext) -> pb.EraseResponse:
        """Erases a tenant."""
        with self._admitted(context):
            return self._admin.forgetter.erase(request)

    def Inspect(
        self, request: pb.InspectRequest, context: grpc.ServicerContext
    ) -> pb.InspectResponse:
        """Objects of a prefix."""
        with self._admitted(context):
            return self._admin.operators.inspect(request)

    def SetMode(
        self, request: pb.SetModeRequest, context: grpc.ServicerContext
    ) -> pb.SetModeResponse:
        """Sets a tenant's mode."""
        with self._admitted(context):
            return self._admin.operators.set_mode(request)

    def AddPublic(
        self, request: pb.AddPublicRequest, context: grpc.ServicerContext
    ) -> pb.PublicPrefix:
        """Opens a prefix to all tenants."""
        with self._admitted(context):
            return self._admin.publisher.add(request)

    def RemovePublic(
        self, request: pb.RemovePublicRequest, context: grpc.ServicerContext
    ) -> pb.RemovePublicResponse:
        """Closes one, and erases it."""
        with self._admitted(context):
            return self._admin.publisher.remove(request)

    def ListPublic(
        self, request: pb.ListPublicRequest, context: grpc.ServicerContext
    ) -> pb.ListPublicResponse:
        """Those that are open."""
        with self._admitted(context):
            return self._admin.publisher.all()

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Lets operators alone pass, and tells them errors as statuses."""
        try:
            allow(self._access.principal(context.invocation_metadata()), Role.ADMIN)
            yield
        except TailReplayError as error:
            context.abort(error.code, str(error))
