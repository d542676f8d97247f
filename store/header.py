"""The byte format of a stored object: a header, then the payload.

All numbers are little-endian. Specified in docs/format.md, held fast by golden bytes in the tests.

    offset  size  field
         0     4  magic "TRPL"
         4     2  format version
         6     1  kind
         7     1  provenance
         8     4  header bytes (a multiple of 64; the payload starts there)
        12     8  payload bytes
        20    32  namespace
        52    32  prefix hash
        84     4  first token
        88     4  end token
        92     4  depth: approximate reuses behind the numbers, 0 when exact
        96     4  eps: accumulated error estimate (float32), 0 when exact
       100     1  dtype
       101     1  state dtype
       102     1  state layout
       103     1  zero
       104    24  shape, six numbers
       128     4  rows
       132     4  page count
       136    4n  crc32c of each page, unit-major
         .     4  crc32c of everything before it
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.geometry import MAX_PAGE_BYTES, Dtype, Geometry, StateLayout
from tailreplay.store.namespace import FORMAT_VERSION
from tailreplay.store.objects import PAGE_TOKENS, Kind, ObjectName, Provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"TRPL"
_FIXED = struct.Struct("<4sHBBIQ32s32sIIIfBBBB6III")
_ALIGN = 64
MAX_HEADER_BYTES = 1 << 20
"""Largest header a reader accepts, in bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a stored object says about itself.

    Attributes:
        name: namespace, kind and prefix hash.
        geometry: shape and dtypes of the payload.
        first_token: position of row 0.
        rows: rows in the payload; 1 for a checkpoint.
        page_crcs: crc32c of each page, unit-major.
        provenance: exact or approximate.
        depth: approximate reuses behind the numbers.
        eps: accumulated error estimate.
    """

    name: ObjectName
    geometry: Geometry
    first_token: int
    rows: int
    page_crcs: tuple[int, ...]
    provenance: Provenance = Provenance.EXACT
    depth: int = 0
    eps: float = 0.0

    @property
    def end_token(self) -> int:
        """One past the position of the last row."""
        return self.first_token + self.rows

    @property
    def header_bytes(self) -> int:
        """Offset of the payload."""
        return header_bytes(len(self.page_crcs))

    @property
    def payload_bytes(self) -> int:
        """Size of the payload."""
        return self.geometry.payload_bytes(self.rows)

    def pack(self) -> bytes:
        """The header's bytes, `header_bytes` of them."""
        shape = self.geometry
        fixed = _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            self.name.kind,
            self.provenance,
            self.header_bytes,
            self.payload_bytes,
            self.name.namespace,
            self.name.prefix_hash,
            self.first_token,
            self.end_token,
            self.depth,
            self.eps,
            shape.dtype,
            shape.state_dtype,
            shape.state_layout,
            0,
            *shape.shape,
            self.rows,
            len(self.page_crcs),
        )
        body = fixed + struct.pack(f"<{len(self.page_crcs)}I", *self.page_crcs)
        return (body + crc32c(body).to_bytes(4, "little")).ljust(self.header_bytes, b"\0")


def header_bytes(pages: int) -> int:
    """Size of a header with `pages` page checksums, a multiple of 64."""
    return -(-(_FIXED.size + 4 * pages + 4) // _ALIGN) * _ALIGN


def page_count(geometry: Geometry, rows: int) -> int:
    """Pages in a payload with `rows` rows."""
    return geometry.units * -(-rows // PAGE_TOKENS)


def object_bytes(geometry: Geometry, rows: int) -> int:
    """Size of a stored object with `rows` rows, header included."""
    return header_bytes(page_count(geometry, rows)) + geometry.payload_bytes(rows)


def build_object(header: Header, payload: bytes | memoryview) -> tuple[bytes, memoryview]:
    """Header with the payload's page checksums filled in, and the payload, ready to send.

    Raises:
        InvalidRequest: the payload's size or a page's size is not what the geometry allows.
    """
    view = memoryview(payload).cast("B")
    if len(view) != header.payload_bytes:
        raise InvalidRequest(
            f"payload has {len(view)} bytes, wanted {header.payload_bytes} for "
            f"{header.rows} rows of {header.geometry}"
        )
    crcs = tuple(crc32c(view[start:end]) for start, end in _pages(header.geometry, header.rows))
    sealed = Header(
        header.name,
        header.geometry,
        header.first_token,
        header.rows,
        crcs,
        header.provenance,
        header.depth,
        header.eps,
    )
    return sealed.pack(), view


def parse_header(data: bytes | memoryview) -> Header:
    """Reads the header at the start of a stored object.

    Raises:
        IntegrityError: the bytes are no header of this version, or are damaged.
    """
    view = memoryview(data).cast("B")
    if len(view) < _FIXED.size:
        raise IntegrityError(f"object has {len(view)} bytes, wanted at least {_FIXED.size}")
    fields = _FIXED.unpack_from(view)
    magic, version, kind, provenance, size, payload_size = fields[:6]
    if magic != MAGIC or version != FORMAT_VERSION:
        raise IntegrityError(
            f"object starts with {magic!r} version {version}, "
            f"wanted {MAGIC!r} version {FORMAT_VERSION}"
        )
    pages = fields[-1]
    if size != header_bytes(pages) or size > min(len(view), MAX_HEADER_BYTES):
        raise IntegrityError(f"header of {pages} pages says {size} bytes, object has {len(view)}")
    end = _FIXED.size + 4 * pages
    if crc32c(view[:end]) != int.from_bytes(view[end : end + 4], "little"):
        raise IntegrityError("header checksum does not fit")
    try:
        header = _header(fields, struct.unpack_from(f"<{pages}I", view, _FIXED.size), kind)
    except ValueError as error:
        raise IntegrityError(f"header field out of range: {error}") from None
    if (header.end_token, header.payload_bytes) != (fields[9], payload_size):
        raise IntegrityError(
            f"header says rows end at {fields[9]} and {payload_size} payload bytes, its geometry "
            f"gives {header.end_token} and {header.payload_bytes} (provenance {provenance})"
        )
    if pages != page_count(header.geometry, header.rows):
        raise IntegrityError(f"header lists {pages} pages, wanted {header.geometry}")
    return header


def verify_object(data: memoryview, name: ObjectName) -> Header:
    """Checks a whole stored object: header, identity, size and every page.

    Raises:
        IntegrityError: anything about it is not as it should be for `name`.
    """
    header = parse_header(data)
    if header.name != name:
        raise IntegrityError(f"object is of {header.name.kind.name} of another prefix, wanted ours")
    payload = data[header.header_bytes :]
    if len(payload) != header.payload_bytes:
        raise IntegrityError(f"payload has {len(payload)} bytes, wanted {header.payload_bytes}")
    pages = _pages(header.geometry, header.rows)
    for number, ((start, end), crc) in enumerate(zip(pages, header.page_crcs, strict=True)):
        if crc32c(payload[start:end]) != crc:
            raise IntegrityError(f"page {number} of a {name.kind.name} object is damaged")
    return header


def _header(fields: tuple[object, ...], crcs: tuple[int, ...], kind: int) -> Header:
    (_, _, _, provenance, _, _, namespace, prefix_hash, first, _, depth, eps) = fields[:12]
    dtype, state_dtype, layout = fields[12:15]
    geometry = Geometry(
        Kind(kind),
        Dtype(dtype),  # type: ignore[arg-type]  # struct fields are untyped
        tuple(fields[16:22]),  # type: ignore[arg-type]
        Dtype(state_dtype),  # type: ignore[arg-type]
        StateLayout(layout),  # type: ignore[arg-type]
    )
    name = ObjectName(namespace, geometry.kind, prefix_hash)  # type: ignore[arg-type]
    rows = fields[22]
    return Header(name, geometry, first, rows, crcs, Provenance(provenance), depth, eps)  # type: ignore[arg-type]


def _pages(geometry: Geometry, rows: int) -> Iterator[tuple[int, int]]:
    """Byte range of each page in a payload, unit-major."""
    if min(rows, PAGE_TOKENS) * geometry.row_bytes > MAX_PAGE_BYTES:
        raise InvalidRequest(
            f"a page of {geometry} has {min(rows, PAGE_TOKENS) * geometry.row_bytes} bytes, "
            f"wanted at most {MAX_PAGE_BYTES}"
        )
    unit_bytes = rows * geometry.row_bytes
    page_bytes = PAGE_TOKENS * geometry.row_bytes
    for unit in range(geometry.units):
        start = unit * unit_bytes
        for at in range(start, start + unit_bytes, page_bytes):
            yield at, min(at + page_bytes, start + unit_bytes)
