"""What a writer announces before it sends it: objects that may be stored at their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.errors import InvalidRequest, LimitExceeded
from tailreplay.store.header import header_bytes
from tailreplay.store.objects import (
    BLOCK_TOKENS,
    MAX_TAIL_FIGURES_BYTES,
    TAIL_FIGURE_BYTES,
    Kind,
)

if TYPE_CHECKING:
    from tailreplay.proto import store_pb2 as pb

KINDS = {int(kind): kind for kind in Kind}
"""By number on the wire."""

_LEAST_BYTES = header_bytes(1)


def check_announced(wanted: pb.PutObject, total: int, max_object_bytes: int) -> None:
    """Refuses what no object of a prefix can be.

    Args:
        wanted: what is announced.
        total: tokens of the prefix.
        max_object_bytes: largest object taken.

    Raises:
        InvalidRequest: its kind, size, figures or place.
        LimitExceeded: it is too large.
    """
    first, end, kind = wanted.first_token, wanted.end_token, KINDS.get(wanted.kind)
    if kind is None:
        raise InvalidRequest(
            f"object has kind {int(wanted.kind)}, wanted one of {[k.name for k in Kind]}"
        )
    if wanted.size_bytes < _LEAST_BYTES:
        raise InvalidRequest(
            f"object has {wanted.size_bytes} bytes, wanted at least {_LEAST_BYTES}"
        )
    if wanted.size_bytes > max_object_bytes:
        raise LimitExceeded(
            f"object has {wanted.size_bytes} bytes, wanted at most {max_object_bytes}"
        )
    if not first < end <= total:
        raise InvalidRequest(
            f"object covers [{first}, {end}), wanted a part of [0, {total}), the tokens in `begin`"
        )
    figures = len(wanted.tail_figures)
    most = MAX_TAIL_FIGURES_BYTES if kind is Kind.HIDDEN else 0
    if figures > most or figures % TAIL_FIGURE_BYTES:
        raise InvalidRequest(
            f"{kind.name} object has {figures} bytes of tail figures, wanted a multiple "
            f"of {TAIL_FIGURE_BYTES} up to {most}"
        )
    grid = BLOCK_TOKENS[kind]
    if first % grid or end != min(first + grid, total):
        raise InvalidRequest(
            f"{kind.name} object covers [{first}, {end}) of {total} tokens, "
            "which is no block of its kind's grid"
        )
