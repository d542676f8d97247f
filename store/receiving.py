"""Rows off a socket, checksummed piece by piece while the processor's cache has them."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from tailreplay.store.checksum import crc32c_of
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.lane_wire import receive_into

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

_compiled: Callable[..., tuple[int, int] | None] | None
try:
    from tailreplay.store._crc32c import receive_rows as _compiled
except ImportError:  # it is built where there is a C compiler, and runs where the processor can
    _compiled = None

_PIECE_BYTES = 256 << 10
"""Read before they are checksummed: fewer than the processor's cache has."""


def receive_rows(
    sock: socket.socket, rows: npt.NDArray[np.uint8], ahead: bytearray
) -> tuple[int, int]:
    """Fills `[units, rows, row bytes]` with what comes next.

    Args:
        sock: where from.
        rows: what to fill.
        ahead: for bytes behind them, as far as they happen to be there already.

    Returns:
        Checksum of the rows, and how many bytes `ahead` has.

    Raises:
        StoreUnavailable: the stream ends before they are full.
        OSError: it breaks, or nothing comes within the socket's timeout.
        ValueError: the rows of a unit do not lie back to back.
    """
    if _compiled is None or isinstance(sock, ssl.SSLSocket):
        return _received(sock, rows), 0
    timeout_s = sock.gettimeout()
    timeout_ms = -1 if timeout_s is None else int(timeout_s * 1000)
    came = _compiled(sock.fileno(), rows, timeout_ms, ahead)
    if came is None:
        raise StoreUnavailable("the lane was closed in the middle of a message")
    return came


def contiguous(rows: npt.NDArray[np.uint8]) -> list[memoryview]:
    """The memory of `[units, rows, row bytes]`, in pieces that are contiguous.

    Raises:
        ValueError: the rows of a unit do not lie back to back.
    """
    if rows.flags.c_contiguous:
        return [rows.reshape(-1).data]
    if rows.strides[1:] != (rows.shape[2], 1):
        raise ValueError(
            f"rows of shape {rows.shape} have strides {rows.strides}, wanted each unit contiguous"
        )
    return [unit.reshape(-1).data for unit in rows]


def _received(sock: socket.socket, rows: npt.NDArray[np.uint8]) -> int:
    crc = 0
    for part in contiguous(rows):
        for at in range(0, len(part), _PIECE_BYTES):
            piece = part[at : at + _PIECE_BYTES]
            receive_into(sock, [piece])
            crc = crc32c_of([piece], crc)
    return crc
