"""The client's side of TLS and tokens: what an engine or a command brings to a store."""
# ruff: noqa: ANN401 - gRPC's interceptors are untyped

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailreplay.store.address import is_local
from tailreplay.store.auth import BEARER, METADATA_KEY
from tailreplay.store.pem import check_certificates, check_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


class Credentials(BaseModel):
    """How a client shows who it is, and checks who the store is.

    Without `ca` the connection is in the clear. Certificates are read when a client is made, a
    token before every call, so that it can be renewed in place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Annotated[Path | None, Field(description="PEM: CA of the store's certificate")] = None
    cert: Annotated[Path | None, Field(description="PEM: the client's own certificate")] = None
    key: Annotated[Path | None, Field(description="PEM: its private key")] = None
    token_file: Annotated[Path | None, Field(description="file that holds the bearer token")] = None

    @model_validator(mode="after")
    def _belong_together(self) -> Credentials:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together, one of them is missing")
        if self.cert is not None and self.ca is None:
            raise ValueError("cert is set without ca, the CA of the store's certificate")
        return self

    def channel(self, address: str, options: Sequence[tuple[str, object]]) -> grpc.Channel:
        """A gRPC channel to a store, whose calls carry the token.

        Raises:
            ValueError: a file is of no use, or a token would cross a network in the clear.
        """
        if self.ca is None or address.startswith("unix:"):
            if self.token_file is not None and not is_local(address):
                raise ValueError(
                    f"a token would go to {address} in the clear, wanted ca, the CA of its "
                    "certificate"
                )
            return self._with_token(grpc.insecure_channel(address, options=options))
        try:
            ca, key, cert = (
                file.read_bytes() if file else None for file in (self.ca, self.key, self.cert)
            )
        except OSError as error:
            raise ValueError(f"{error.filename} can not be read: {error.strerror}") from None
        check_certificates(self.ca)
        if self.cert is not None and self.key is not None:
            check_pair(self.cert, self.key)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return self._with_token(grpc.secure_channel(address, credentials, options=options))

    def _with_token(self, channel: grpc.Channel) -> grpc.Channel:
        if self.token_file is None:
            return channel
        return grpc.intercept_channel(channel, _Bearer(self))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries.

        Raises:
            ValueError: the token file can not be read, or holds no token.
        """
        if self.token_file is None:
            return ()
        return ((METADATA_KEY, f"{BEARER}{_token(self.token_file)}"),)

    def context(self) -> ssl.SSLContext | None:
        """For a data lane over TCP; None = in the clear.

        Raises:
            ValueError: a file can not be read or used.
        """
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # SSLError is one
            raise ValueError(f"{self.ca}, {self.cert} or {self.key}: {error}") from None
        return context


def _token(file: Path) -> str:
    """The token in a file; what is wrong with one is said without its content.

    gRPC would repeat a value that it can not send.
    """
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{file} can not be read: {error.strerror}") from None
    if not token:
        raise ValueError(f"{file} is empty, wanted a token")
    if any(not 0x20 <= byte < 0x7F for byte in token):
        raise ValueError(f"{file} holds no token: wanted one line of printable ASCII")
    return token.decode("ascii")


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc,unused-ignore]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc,unused-ignore]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc,unused-ignore]
):
    """Puts the token into every call; without one the store says what is wrong."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        # Guarded by _lock: what was wrong with the token last, which is said once.
        self._lock = threading.Lock()
        self._fault = ""

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        try:
            metadata = [*(details.metadata or ()), *self._credentials.metadata()]
        except ValueError as error:
            self._note(str(error))
            return continuation(details, request)
        self._note("")
        return continuation(details._replace(metadata=metadata), request)

    def _note(self, fault: str) -> None:
        with self._lock:
            is_new, self._fault = fault != self._fault, fault
        if is_new and fault:
            logger.warning("no token for the store: %s", fault)

    # Three methods, since gRPC asks for them by name.

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return self._intercept(continuation, client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return self._intercept(continuation, client_call_details, request)

    def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return self._intercept(continuation, client_call_details, request_iterator)


NO_CREDENTIALS = Credentials()
