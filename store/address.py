"""Addresses of stores: `unix:///path` or `host:port`."""

from __future__ import annotations

import ipaddress

MAX_SOCKET_PATH_BYTES = 107
"""What the kernel takes as the path of a Unix socket."""

_MAX_PORT = 65535


def checked_address(address: object) -> str:
    """The address, if it is one.

    Raises:
        ValueError: it is none; the message says what is wrong with it.
    """
    wanted = "wanted unix:///path/to.sock or host:port"
    if not isinstance(address, str):
        raise ValueError(f"address is {address!r}, {wanted}")  # noqa: TRY004 - a wrong value
    if address.startswith("unix:"):
        path = socket_path(address)
        if not path.startswith("/"):
            raise ValueError(f"address is {address!r}, {wanted}: the path is not absolute")
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"socket path {path!r} has {len(path.encode())} bytes, wanted at most "
                f"{MAX_SOCKET_PATH_BYTES}"
            )
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host:
        raise ValueError(f"address is {address!r}, {wanted}")
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"address is {address!r}, {wanted} with a port from 0 to {_MAX_PORT}")
    return address


def socket_path(address: str) -> str:
    """Path of a Unix socket's address."""
    return address.removeprefix("unix:").removeprefix("//")


def host_of(address: str) -> str:
    """Host of a TCP address, without the brackets of an IPv6 one."""
    return address.rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address: a Unix socket, or a loopback host."""
    if address.startswith("unix:") or host_of(address) == "localhost":
        return True
    try:
        return ipaddress.ip_address(host_of(address)).is_loopback
    except ValueError:
        return False
