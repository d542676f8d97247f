"""What is wrong with TLS between a client and a store, where gRPC's words help nobody."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from tailreplay.store.address import host_of

if TYPE_CHECKING:
    from tailreplay.store.credentials import Credentials

_WAIT_S = 2.0


def tls_fault(address: str, credentials: Credentials, flag: str = "--") -> str:
    """Why a connection of theirs can not come about, and what to change.

    Asks the store by a connection of its own; to be called when a call has failed.

    Args:
        address: host:port of a store.
        credentials: what the client has.
        flag: in front of the names of its parts, as the client gives them.

    Returns:
        A sentence; empty if it is not TLS, or not over TCP.
    """
    if address.startswith("unix:"):
        return ""
    try:
        if credentials.ca is None:
            return _clear_to(address, flag)
        return _secured_to(address, credentials, flag)
    except (OSError, ValueError):  # nobody listens, or a file can not be used: others say that
        return ""


def _clear_to(address: str, flag: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _connected(address) as plain:
        try:
            context.wrap_socket(plain).close()
        except ssl.SSLError as error:
            if "CERT" not in str(error.reason).upper():
                return ""
    return (
        f"store at {address} speaks TLS, and you do not: wanted {flag}ca with the CA of its "
        "certificate"
    )


def _secured_to(address: str, credentials: Credentials, flag: str) -> str:
    context = credentials.context()
    if context is None:
        return ""
    context.set_alpn_protocols(["h2"])
    plain = _connected(address)
    try:
        secured = context.wrap_socket(plain, server_hostname=host_of(address))
    except ssl.SSLCertVerificationError as error:
        return (
            f"store at {address} shows a certificate that {flag}ca {credentials.ca} does not vouch "
            f"for ({error.verify_message}): wanted the CA that has signed it, and an address that "
            "is in it"
        )
    except TimeoutError:
        return ""
    except (ssl.SSLError, ConnectionError):
        return (
            f"store at {address} speaks no TLS: wanted no {flag}ca, or a store with tls_cert and "
            "tls_key"
        )
    finally:
        plain.close()
    with secured:
        return "" if _is_welcome(secured) else _unwelcome(address, credentials, flag)


def _is_welcome(secured: ssl.SSLSocket) -> bool:
    """Whether the store goes on after the handshake; it looks at the client's certificate then."""
    try:
        return bool(secured.recv(1))
    except TimeoutError:
        return True
    except OSError:  # SSLError is one
        return False


def _unwelcome(address: str, credentials: Credentials, flag: str) -> str:
    if credentials.cert is None:
        return (
            f"store at {address} asks clients for a certificate (its tls_client_ca): wanted "
            f"{flag}cert and {flag}key"
        )
    return (
        f"store at {address} does not take {flag}cert {credentials.cert}: wanted one that its "
        "tls_client_ca has signed"
    )


def _connected(address: str) -> socket.socket:
    host, port = host_of(address), int(address.rpartition(":")[2])
    return socket.create_connection((host, port), timeout=_WAIT_S)
