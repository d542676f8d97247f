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
         .     .  zeros up to the payload
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tailreplay.store.checksum import crc32c, page_checksums
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.geometry import MAX_PAGE_BYTES, Dtype, Geometry, StateLayout
from tailreplay.store.namespace import FORMAT_VERSION
from tailreplay.store.objects import BLOCK_TOKENS, PAGE_TOKENS, Kind, ObjectName, Provenance

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"TRPL"
_FIXED = struct.Struct("<4sHBBIQ32s32sIIIfBBBB6III")
_ALIGN = 64
MAX_HEADER_BYTES = 1 << 20
"""Largest header a reader accepts, in bytes."""

_KNOWN_SHAPES = 256
"""Shapes that are kept, of headers good and bad; a store's namespaces have three each."""

_SHAPE_FIELDS = {Kind.KV: 3, Kind.HIDDEN: 2, Kind.CHECKPOINT: 6}


@dataclass(frozen=True)
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

    @cached_property
    def header_bytes(self) -> int:
        """Offset of the payload."""
        return header_bytes(len(self.page_crcs))

    @cached_property
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


def build_parts(header: Header, payload: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Header with the payload's page checksums filled in, and the payload, ready to send.

    Args:
        header: without checksums.
        payload: in parts of whole units, which stay where they lie.

    Raises:
        InvalidRequest: the geometry is not one of its kind, the payload has another size, or a part
            ends inside a unit.
    """
    if fault := _fault(header):
        raise InvalidRequest(f"header of a {header.name.kind.name} object: {fault}")
    views = [memoryview(part).cast("B") for part in payload]
    size, unit_bytes = sum(map(len, views)), header.rows * header.geometry.row_bytes
    if size != header.payload_bytes or any(len(view) % unit_bytes for view in views):
        raise InvalidRequest(
            f"payload has {size} bytes in {len(views)} parts, wanted {header.payload_bytes} for "
            f"{header.rows} rows of {header.geometry}, in parts of whole units"
        )
    crcs = [crc for v in views for crc in _page_checksums(v, header.geometry, header.rows)]
    return [memoryview(replace(header, page_crcs=tuple(crcs)).pack()), *views]


def parse_header(data: bytes | memoryview) -> Header:
    """Reads the header at the start of a stored object.

    Raises:
        IntegrityError: the bytes are no header of this version, or are damaged.
    """
    view = memoryview(data).cast("B")
    fields, crcs = _sealed_fields(view)
    try:
        header = _header(fields, crcs)
    except ValueError as error:
        raise IntegrityError(f"header field out of range: {error}") from None
    if fault := _fault(header):
        raise IntegrityError(f"header of a {header.name.kind.name} object: {fault}")
    wanted = _sizes(header.geometry, header.rows)
    if len(crcs) != wanted.pages:
        raise IntegrityError(f"header lists {len(crcs)} pages, wanted {wanted.pages}")
    end, payload = fields[9], fields[5]
    if (end, payload) != (header.end_token, wanted.payload_bytes):
        raise IntegrityError(
            f"header says rows end at {end} and {payload} payload bytes, its geometry "
            f"gives {header.end_token} and {wanted.payload_bytes}"
        )
    return header


def header_of(data: memoryview) -> bytes:
    """The bytes of the header at the start of an object, as far as it says how many they are."""
    return bytes(data[: int.from_bytes(data[8:12], "little")][:MAX_HEADER_BYTES])


known_header = lru_cache(maxsize=1024)(parse_header)
"""As `parse_header`, by the header's bytes: one that is damaged is parsed, and refused."""


def verify_object(data: memoryview, name: ObjectName) -> Header:
    """Checks a whole stored object: header, identity, size and every page.

    Raises:
        IntegrityError: anything about it is not as it should be for `name`.
    """
    header = parse_header(data)
    if header.name != name:
        raise IntegrityError(f"object is of {header.name.kind.name} of another prefix, wanted ours")
    payload = data[header.header_bytes :]
    wanted = _sizes(header.geometry, header.rows).payload_bytes
    if len(payload) != wanted:
        raise IntegrityError(f"payload has {len(payload)} bytes, wanted {wanted}")
    found = _page_checksums(payload, header.geometry, header.rows)
    if found != header.page_crcs:
        number = next(i for i, crc in enumerate(header.page_crcs) if found[i] != crc)
        raise IntegrityError(f"page {number} of a {name.kind.name} object is damaged")
    return header


def rename(data: memoryview, header: Header, namespace: bytes) -> None:
    """Writes another namespace into the header of a verified object, in place."""
    name = replace(header.name, namespace=namespace)
    data[: header.header_bytes] = replace(header, name=name).pack()


def _sealed_fields(view: memoryview) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Fixed fields and page checksums of a header whose own checksum fits."""
    if len(view) < _FIXED.size:
        raise IntegrityError(f"object has {len(view)} bytes, wanted at least {_FIXED.size}")
    fields = _FIXED.unpack_from(view)
    (magic, version), size, pages = fields[:2], fields[4], fields[-1]
    if magic != MAGIC or version != FORMAT_VERSION:
        raise IntegrityError(
            f"object starts with {magic!r} version {version}, "
            f"wanted {MAGIC!r} version {FORMAT_VERSION}"
        )
    if size != header_bytes(pages) or size > min(len(view), MAX_HEADER_BYTES):
        raise IntegrityError(f"header of {pages} pages says {size} bytes, object has {len(view)}")
    end = _FIXED.size + 4 * pages
    if crc32c(view[:end]) != int.from_bytes(view[end : end + 4], "little"):
        raise IntegrityError("header checksum does not fit")
    if fields[15] or any(view[end + 4 : size]):
        raise IntegrityError("header has bytes set that must be zero")
    return fields, struct.unpack_from(f"<{pages}I", view, _FIXED.size)


def _header(fields: tuple[Any, ...], crcs: tuple[int, ...]) -> Header:
    _, _, kind, provenance, _, _, namespace, prefix_hash, first, _, depth, eps = fields[:12]
    geometry = _geometry(kind, *fields[12:15], fields[16:22])
    name = ObjectName(namespace, geometry.kind, prefix_hash)
    return Header(name, geometry, first, fields[22], crcs, Provenance(provenance), depth, eps)


@lru_cache(maxsize=_KNOWN_SHAPES)
def _geometry(
    kind: int, dtype: int, state_dtype: int, layout: int, shape: tuple[int, int, int, int, int, int]
) -> Geometry:
    return Geometry(Kind(kind), Dtype(dtype), shape, Dtype(state_dtype), StateLayout(layout))


def _fault(header: Header) -> str:
    """What is wrong with a header's numbers, taken by themselves; empty when nothing is."""
    geometry = header.geometry
    if geometry.kind is not header.name.kind:
        return f"{geometry} is no shape of its kind"
    if fault := _sizes(geometry, header.rows).fault:
        return fault
    if not _is_error_figure(header):
        return f"eps {header.eps} at depth {header.depth} with {header.provenance.name} numbers"
    return ""


class _Sizes(NamedTuple):
    """What follows from a geometry and a number of rows, and what is wrong with them."""

    pages: int
    payload_bytes: int
    fault: str


@lru_cache(maxsize=_KNOWN_SHAPES)
def _sizes(geometry: Geometry, rows: int) -> _Sizes:
    return _Sizes(
        page_count(geometry, rows), geometry.payload_bytes(rows), _size_fault(geometry, rows)
    )


def _size_fault(geometry: Geometry, rows: int) -> str:
    most = BLOCK_TOKENS[geometry.kind]
    page_bytes = min(rows, PAGE_TOKENS) * geometry.row_bytes
    if not _is_shape(geometry):
        return f"{geometry} is no shape of its kind"
    if not 1 <= rows <= most:
        return f"{rows} rows, wanted 1 to {most}"
    if page_bytes > MAX_PAGE_BYTES:
        return f"a page has {page_bytes} bytes, wanted at most {MAX_PAGE_BYTES}"
    return ""


def _is_shape(geometry: Geometry) -> bool:
    used = _SHAPE_FIELDS[geometry.kind]
    has_state = {
        geometry.state_dtype is not Dtype.NONE,
        geometry.state_layout is not StateLayout.NONE,
    }
    return (
        min(geometry.shape[:used]) > 0
        and not any(geometry.shape[used:])
        and geometry.dtype is not Dtype.NONE
        and has_state == {geometry.kind is Kind.CHECKPOINT}
    )


def _is_error_figure(header: Header) -> bool:
    if header.provenance is Provenance.EXACT:
        return header.depth == 0 and header.eps == 0
    return math.isfinite(header.eps) and header.eps >= 0


def _page_checksums(payload: memoryview, geometry: Geometry, rows: int) -> tuple[int, ...]:
    """Checksum of each page in a payload, unit-major."""
    row_bytes = geometry.row_bytes
    return page_checksums(payload, rows * row_bytes, PAGE_TOKENS * row_bytes)
