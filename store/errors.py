"""Errors a caller can act on, and their one mapping to and from gRPC status codes.

    TailReplayError
    ├── InvalidRequest       INVALID_ARGUMENT     malformed; sending it again will not help
    ├── GeometryMismatch     FAILED_PRECONDITION  objects do not fit what the namespace holds
    ├── IntegrityError       DATA_LOSS            bytes are not what their checksum says
    ├── LimitExceeded        RESOURCE_EXHAUSTED   larger or more than this store allows
    ├── NotAuthenticated     UNAUTHENTICATED      no token, or one that is not good
    ├── NotAllowed           PERMISSION_DENIED    the token's role may not do this
    └── StoreUnavailable     UNAVAILABLE          absent, draining, too slow, or broken

A miss is a value, never one of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import grpc

if TYPE_CHECKING:
    from collections.abc import Mapping


class TailReplayError(Exception):
    """Base of the tree; never raised itself."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN


class InvalidRequest(TailReplayError):
    """The request is malformed; sending it again will not help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class GeometryMismatch(TailReplayError):
    """The objects' shapes or dtypes are not those that the namespace holds."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class IntegrityError(TailReplayError):
    """Bytes are damaged, truncated, or belong to another object."""

    code = grpc.StatusCode.DATA_LOSS


class LimitExceeded(TailReplayError):
    """Something is larger or more than the store allows."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotAuthenticated(TailReplayError):
    """The call brought no token, or one that is not good."""

    code = grpc.StatusCode.UNAUTHENTICATED


class NotAllowed(TailReplayError):
    """The caller is known, and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class StoreUnavailable(TailReplayError):
    """The store is absent, draining, too slow, or answered with a fault of its own."""

    code = grpc.StatusCode.UNAVAILABLE


_BY_CODE: Mapping[grpc.StatusCode, type[TailReplayError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        GeometryMismatch,
        IntegrityError,
        LimitExceeded,
        NotAuthenticated,
        NotAllowed,
        StoreUnavailable,
    )
}


def from_status(code: int, text: str) -> TailReplayError:
    """The tree's error for a status number; numbers it does not have become StoreUnavailable."""
    by_number = {status.value[0]: error for status, error in _BY_CODE.items()}
    return by_number.get(code, StoreUnavailable)(text)


def from_rpc_error(error: grpc.RpcError, address: str) -> TailReplayError:
    """The tree's error for a failed RPC; codes the tree does not have become StoreUnavailable."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    kind = _BY_CODE.get(code, StoreUnavailable)
    return kind(f"store at {address}: {code.name}: {details}")
