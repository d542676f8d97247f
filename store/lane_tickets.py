"""Tickets that open data lanes: for one client, once, and soon."""

from __future__ import annotations

import ipaddress
import secrets
import ssl
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tailreplay.store.errors import NotAuthenticated
from tailreplay.store.lane_wire import TICKET_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    import grpc

    from tailreplay.store.auth import Principal

TICKET_S = 10.0
"""Life of a ticket, seconds."""

_MAX_OF_A_CLIENT = 128
_MAX_TICKETS = 4096


@dataclass(frozen=True, slots=True)
class Client:
    """What gRPC and the lane both see of a client.

    Attributes:
        host: its address; empty over a Unix socket.
        certificate: its TLS certificate, DER; empty without one.
    """

    host: str = ""
    certificate: bytes = b""


@dataclass(frozen=True, slots=True)
class _Ticket:
    client: Client
    principal: Principal
    ends_s: float


class Tickets:
    """Every ticket that is good. Thread-safe.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Guarded by _lock: tickets, oldest first.
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}

    def issue(self, client: Client, principal: Principal) -> bytes:
        """A ticket for one lane; a client that asks for too many loses its own oldest."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            now = self._clock()
            good = {key: t for key, t in self._tickets.items() if t.ends_s > now}
            own = [k for k, t in good.items() if (t.client, t.principal) == (client, principal)]
            for key in own[: max(0, len(own) + 1 - _MAX_OF_A_CLIENT)]:
                del good[key]
            if len(good) >= _MAX_TICKETS:
                del good[next(iter(good))]
            good[ticket] = _Ticket(client, principal, now + TICKET_S)
            self._tickets = good
        return ticket

    def redeem(self, ticket: bytes, client: Client) -> Principal:
        """Takes a ticket; whoever brings it, it is good no more.

        Raises:
            NotAuthenticated: it is not good, or was given to another client.
        """
        with self._lock:
            found = self._tickets.pop(ticket, None)
            now = self._clock()
        if found is None or found.ends_s <= now or found.client != client:
            raise NotAuthenticated("a lane was opened without a valid ticket of its own")
        return found.principal


def client_of_call(context: grpc.ServicerContext) -> Client:
    """The client of an RPC."""
    kind, _, rest = unquote(context.peer()).partition(":")
    # Its stub says otherwise, but each value is a sequence of bytes.
    context_of_tls: Mapping[str, Sequence[bytes]] = context.auth_context()  # type: ignore[assignment]
    certificates = context_of_tls.get("x509_pem_cert", ())
    return Client(
        _host(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else "",
        ssl.PEM_cert_to_DER_cert(certificates[0].decode()) if certificates else b"",
    )


def client_of_socket(sock: socket.socket) -> Client:
    """The client at the other end of a lane whose handshake, if any, is over."""
    peer = sock.getpeername()
    host = _host(peer[0]) if isinstance(peer, tuple) else ""
    if isinstance(sock, ssl.SSLSocket):
        return Client(host, sock.getpeercert(binary_form=True) or b"")
    return Client(host)


def _host(text: str) -> str:
    """An address in one spelling: IPv4 inside IPv6 is IPv4, and this machine is this machine."""
    address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return "loopback" if address.is_loopback else str(address)
