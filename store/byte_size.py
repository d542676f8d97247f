"""Sizes as people write them: `512MiB`, `20g`, or a number of bytes."""

from __future__ import annotations

import re

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:ib|b)?", re.IGNORECASE | re.ASCII)


def byte_size(text: str) -> int:
    """Bytes; units are binary, with or without `iB`.

    Raises:
        ValueError: it is no size, or not below 8 EiB; says what was wanted.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("wanted a size such as 512MiB, 20GiB or a number of bytes")
    size = int(found[1]) << _UNITS[found[2].lower()]
    if size >= 1 << 63:
        raise ValueError("wanted less than 8 EiB")
    return size
