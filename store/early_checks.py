"""What can be seen to fail before a store loads what is heavy, and reserves its pool."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from tailreplay.store.address import host_of, socket_path
from tailreplay.store.errors import LimitExceeded, StoreUnavailable
from tailreplay.store.grpc_listener import prepare_socket

if TYPE_CHECKING:
    from tailreplay.store.config import StoreConfig

_WAIT_S = 1.0


def check_room(config: StoreConfig) -> None:
    """Looks whether a store's addresses can be had, and its pool smaller than the machine.

    Raises:
        StoreUnavailable: somebody listens at an address, or nobody can.
        LimitExceeded: the pool is larger than the machine's memory.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.pool_bytes > memory:
        raise LimitExceeded(
            f"pool_bytes is {config.pool_bytes}, wanted at most {memory}, this machine's memory"
        )
    for address in (config.listen, config.admin_address, config.http_listen):
        if address is not None:
            _check_free(address)


def _check_free(address: str) -> None:
    try:
        taken = _is_heard(socket_path(address)) if address.startswith("unix:") else _bind(address)
    except OSError as error:
        raise StoreUnavailable(f"can not listen at {address}: {error.strerror}") from None
    if taken:
        raise StoreUnavailable(f"can not listen at {address}: somebody else does, wanted another")
    prepare_socket(address)


def _is_heard(path: str) -> bool:
    """Whether anybody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_WAIT_S)
        try:
            asking.connect(path)
        except OSError:
            return False
    return True


def _bind(address: str) -> bool:
    """Takes a TCP address, and lets go of it again; its errors say that it is not to be had."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
    return False
