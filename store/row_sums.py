"""Checksums of row ranges out of the page checksums that objects carry.

Whoever reads rows checks them against what their engine computed when it stored them: the store
touches no byte on the way, and damage done to its memory meanwhile is seen too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.store.checksum import crc32c, crc32c_of, joined
from tailreplay.store.errors import IntegrityError
from tailreplay.store.objects import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailreplay.store.header import Header

_LEAST_PAGE_BYTES = 16 << 10
"""Below this a page is checksummed faster than its checksum is joined to another's."""


def check_pages(
    header: Header, payload: memoryview, units: range, rows: range, *, every: bool = False
) -> None:
    """Checks the pages of some rows whose checksums `crc32c_of_rows` does not take for granted.

    It works those of parts of pages, and of small pages, out of what is there: damage done to them
    in memory would be sent as what was stored.

    Args:
        header: of the object.
        payload: of the object, all of it.
        units: whose rows are wanted.
        rows: which.
        every: check the others, too.

    Raises:
        IntegrityError: one is damaged.
    """
    row_bytes = header.geometry.row_bytes
    page_rows = PAGE_TOKENS if header.rows > 1 else 1
    first, behind = rows.start // page_rows, -(-rows.stop // page_rows)
    touched: Sequence[int] = range(first, behind)
    if page_rows * row_bytes >= _LEAST_PAGE_BYTES and not every:
        # A page that is sent whole goes under its own checksum; the last one may be no whole page.
        touched = [
            page
            for page in sorted({first, behind - 1})
            if page * page_rows < rows.start or (page + 1) * page_rows > rows.stop
        ]
    pages = -(-header.rows // PAGE_TOKENS)
    for unit in units:
        unit_end = (unit + 1) * header.rows * row_bytes
        for page in touched:
            at = (unit * header.rows + page * page_rows) * row_bytes
            data = payload[at : min(at + page_rows * row_bytes, unit_end)]
            if crc32c(data) != header.page_crcs[unit * pages + page]:
                raise IntegrityError(f"page {page} of unit {unit} is damaged")


def crc32c_of_rows(
    header: Header, first_unit: int, first_row: int, units: Sequence[memoryview]
) -> int:
    """Checksum of rows of one object as if their units were joined.

    Args:
        header: of the object.
        first_unit: unit of the first view.
        first_row: row of the object at which each view starts.
        units: the rows of each unit; looked at only where they are no whole page.
    """
    row_bytes = header.geometry.row_bytes
    # A size that seldom comes, as of a prompt's last page, is not worth its table.
    page_bytes = (PAGE_TOKENS if header.rows > 1 else 1) * row_bytes
    if page_bytes < _LEAST_PAGE_BYTES:
        return crc32c_of(units)
    pages = -(-header.rows // PAGE_TOKENS)
    if len(units[0]) == pages * page_bytes:
        return joined(0, header.page_crcs[first_unit * pages :][: len(units) * pages], page_bytes)
    crc = 0
    for unit, view in enumerate(units, first_unit):
        at, row = 0, first_row
        while at < len(view):
            whole = 0 if row % PAGE_TOKENS else (len(view) - at) // page_bytes
            page = unit * pages + row // PAGE_TOKENS
            size = whole * page_bytes
            if whole:
                crc = joined(crc, header.page_crcs[page : page + whole], page_bytes)
            else:
                size = min((PAGE_TOKENS - row % PAGE_TOKENS) * row_bytes, len(view) - at)
                crc = crc32c_of([view[at : at + size]], crc)
            at, row = at + size, row + size // row_bytes
    return crc
