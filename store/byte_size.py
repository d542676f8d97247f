"""Sizes as people write them: `512MiB`, `20g`, or a number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

_LETTERS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE | re.ASCII)


def byte_size(text: str) -> int:
    """Bytes: `1.5GiB`, or `1.5g`, in units of 1024, `1.5GB` in units of 1000.

    Raises:
        ValueError: it is no size, or not below 8 EiB; says what was wanted.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("wanted a size such as 512MiB, 1.5GiB or a number of bytes")
    number, letter, unit = found[1], found[2].lower(), (found[3] or "").lower()
    size = int(Decimal(number) * (1000 if unit == "b" else 1024) ** _LETTERS.index(letter))
    if size >= 1 << 63:
        raise ValueError("wanted less than 8 EiB")
    return size
