"""Ports of loopback for servers that must be told one."""

import secrets
import socket

_FIRST, _END = 10_000, 32_768
"""Below those that Linux gives by itself, so that no connection or listener has one meanwhile."""


def free_port() -> int:
    """A port that nothing listens on, chosen at random."""
    while True:
        port = _FIRST + secrets.randbelow(_END - _FIRST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
