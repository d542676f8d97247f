"""The stored format: golden bytes, and one error for every way of being malformed."""

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from store_objects import GEOMETRY, Prefix

from tailreplay.store.checksum import crc32c
from tailreplay.store.errors import IntegrityError, InvalidRequest
from tailreplay.store.geometry import Dtype, Geometry, StateLayout, hidden_geometry
from tailreplay.store.header import (
    Header,
    build_parts,
    header_bytes,
    object_bytes,
    page_count,
    parse_header,
    verify_object,
)
from tailreplay.store.objects import Kind, ObjectName, Provenance

NAMESPACE = bytes(range(32))
PREFIX = Prefix(NAMESPACE, range(1, 131))
SPANS = {Kind.KV: (0, 130), Kind.HIDDEN: (64, 128), Kind.CHECKPOINT: (69, 70)}
SPACE_HEX = NAMESPACE.hex()

# Header bytes up to their checksum, and blake3 of the whole object.
GOLDEN = {
    Kind.KV: (
        "5452504c 0200 01 01 c0000000 0041000000000000"
        f"{SPACE_HEX} 9955e949568feb1bbf1450e11b1004e13664307267a1e1de2ddbe8468014e60f"
        "00000000 82000000 00000000 00000000 01 00 00 00"
        "02000000 02000000 04000000 00000000 00000000 00000000 82000000 0c000000"
        "f1920a3a c5a74603 9ed57fcd 3c76f6ef 0843bad6 35b14329 76fcbad8 42c9f6e1 e838b2a2 e9af1bc8"
        "dd9a57f1 768c64f1 705c0cf2",
        "452410ab9bd0a9cafb80474d465c6dab140e3c7d109f087b557b87f98ff45b9e",
    ),
    Kind.HIDDEN: (
        "5452504c 0200 02 01 c0000000 0010000000000000"
        f"{SPACE_HEX} c5881f981df49cc3db46a364b02144b9fe599a34175af0d0dbd20b02e667e0c0"
        "40000000 80000000 00000000 00000000 01 00 00 00"
        "02000000 08000000 00000000 00000000 00000000 00000000 40000000 02000000"
        "6a7865fa 5766232e d1ab3c77",
        "7a198bc47dfbc0e5d6a4d8c271d42144a6ff8a7dac98bc937c1cda6709fd7012",
    ),
    Kind.CHECKPOINT: (
        "5452504c 0200 03 01 c0000000 e004000000000000"
        f"{SPACE_HEX} 2bdf913487a5a8054fcba6059981b54ea230d92695a16cd44234f3f3e17c0cfe"
        "45000000 46000000 00000000 00000000 01 01 01 00"
        "03000000 02000000 01000000 04000000 04000000 03000000 01000000 06000000"
        "0a408a4a d8c21317 21acb6e2 7f4ae271 a442ab2c 30e979b3 4d0b7e65",
        "f5af0661c893ca92109a9e0698fedaf7b96e26bb1a5dc17cde6595bb1e864cbb",
    ),
}
FIELDS_BYTES = 136


def stored(kind: Kind) -> bytes:
    return PREFIX.object(kind, *SPANS[kind])


def name_of(kind: Kind) -> ObjectName:
    return PREFIX.name(kind, SPANS[kind][1])


def resealed(data: bytes, offset: int, field: bytes) -> bytes:
    """An object with a header field changed and the header checksum right again."""
    forged = bytearray(data)
    forged[offset : offset + len(field)] = field
    pages = int.from_bytes(forged[132:136], "little")
    end = FIELDS_BYTES + 4 * pages
    if end + 4 <= len(forged):
        forged[end : end + 4] = crc32c(bytes(forged[:end])).to_bytes(4, "little")
    return bytes(forged)


@pytest.mark.parametrize("kind", Kind)
def test_an_object_is_byte_for_byte_the_golden_one(kind):
    head, digest = GOLDEN[kind]
    data = stored(kind)
    assert data[: len(bytes.fromhex(head))].hex() == bytes.fromhex(head).hex()
    assert not any(data[len(bytes.fromhex(head)) : parse_header(data).header_bytes])
    assert blake3(data).hexdigest() == digest


@pytest.mark.parametrize("kind", Kind)
def test_a_whole_object_is_verified_and_says_what_it_is(kind):
    first, end = SPANS[kind]
    data = stored(kind)
    header = verify_object(memoryview(data), name_of(kind))
    assert (header.name, header.geometry) == (name_of(kind), GEOMETRY[kind])
    assert (header.first_token, header.end_token) == (first, end)
    assert len(data) == object_bytes(header.geometry, header.rows)


small = st.integers(1, 3)
dtypes = st.sampled_from([Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(Kind))
    used = {Kind.KV: 3, Kind.HIDDEN: 2, Kind.CHECKPOINT: 6}[kind]
    shape = tuple(draw(small) for _ in range(used)) + (0,) * (6 - used)
    state = (
        (draw(dtypes), draw(st.sampled_from([StateLayout.K_FIRST, StateLayout.V_FIRST])))
        if kind is Kind.CHECKPOINT
        else ()
    )
    rows = draw(st.integers(1, {Kind.KV: 256, Kind.HIDDEN: 64, Kind.CHECKPOINT: 1}[kind]))
    exact = draw(st.booleans())
    return Header(
        ObjectName(draw(st.binary(min_size=32, max_size=32)), kind, bytes(32)),
        Geometry(kind, draw(dtypes), shape, *state),
        draw(st.integers(0, (1 << 32) - 1 - rows)),
        rows,
        (),
        Provenance.EXACT if exact else Provenance.APPROXIMATE,
        0 if exact else draw(st.integers(0, (1 << 32) - 1)),
        0.0 if exact else draw(st.floats(0, 1e6, width=32)),
    )


@given(headers(), st.randoms(use_true_random=False))
def test_a_header_comes_back_as_it_was(header, random):
    payload = random.randbytes(header.payload_bytes)
    head, view = build_parts(header, [payload])
    data = b"".join([head, view])
    found = verify_object(memoryview(data), header.name)
    assert replace(found, page_crcs=()) == header
    assert len(head) == found.header_bytes == header_bytes(len(found.page_crcs))
    assert len(head) % 64 == 0
    assert len(found.page_crcs) == page_count(header.geometry, header.rows)


@pytest.mark.parametrize("kind", Kind)
def test_an_object_cut_at_any_length_is_an_integrity_error(kind):
    data = stored(kind)
    head = parse_header(data).header_bytes
    for length in [*range(head + 1), *range(head, len(data), 97), len(data) - 1]:
        with pytest.raises(IntegrityError):
            verify_object(memoryview(data)[:length], name_of(kind))


def test_an_object_that_goes_on_is_an_integrity_error():
    with pytest.raises(IntegrityError, match="payload has"):
        verify_object(memoryview(stored(Kind.KV) + b"\0"), name_of(Kind.KV))


@pytest.mark.parametrize("kind", Kind)
def test_every_bit_of_the_header_counts(kind):
    data = bytearray(stored(kind))
    for bit in range(8 * parse_header(data).header_bytes):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            verify_object(memoryview(data), name_of(kind))
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("kind", Kind)
def test_a_damaged_byte_is_traced_to_its_page(kind):
    data = bytearray(stored(kind))
    header = parse_header(data)
    at = header.header_bytes
    sizes = [min(64, header.rows - row) for row in range(0, header.rows, 64)]
    for page, rows in enumerate(sizes * header.geometry.units):
        at += rows * header.geometry.row_bytes
        data[at - 1] ^= 0x10  # the last byte of the page
        with pytest.raises(IntegrityError, match=f"page {page} of a {kind.name} object"):
            verify_object(memoryview(data), name_of(kind))
        data[at - 1] ^= 0x10
    assert at == len(data)


@pytest.mark.parametrize("kind", Kind)
def test_an_object_of_another_prefix_namespace_or_kind_is_an_integrity_error(kind):
    first, end = SPANS[kind]
    other_prefix = Prefix(NAMESPACE, [9, *range(2, 131)])
    other_space = Prefix(bytes(32), range(1, 131))
    other_kind = Kind.HIDDEN if kind is Kind.CHECKPOINT else Kind.CHECKPOINT
    for other in (
        other_prefix.object(kind, first, end),
        other_space.object(kind, first, end),
        PREFIX.object(other_kind, 64 if other_kind is Kind.HIDDEN else end - 1, end),
    ):
        with pytest.raises(IntegrityError, match="wanted ours"):
            verify_object(memoryview(other), name_of(kind))


LIE = {
    "magic": (0, b"TRPX"),
    "version": (4, b"\x01\x00"),
    "kind 0": (6, b"\0"),
    "kind 9": (6, b"\x09"),
    "provenance 0": (7, b"\0"),
    "provenance 3": (7, b"\x03"),
    "header size": (8, struct.pack("<I", 256)),
    "payload size": (12, struct.pack("<Q", 1)),
    "first token": (84, struct.pack("<I", 1)),
    "end token": (88, struct.pack("<I", 131)),
    "depth of an exact object": (92, struct.pack("<I", 1)),
    "eps of an exact object": (96, struct.pack("<f", 0.5)),
    "no dtype": (100, b"\0"),
    "unknown dtype": (100, b"\x09"),
    "state dtype": (101, b"\x01"),
    "state layout": (102, b"\x01"),
    "reserved byte": (103, b"\x01"),
    "no layers": (104, struct.pack("<I", 0)),
    "no heads": (108, struct.pack("<I", 0)),
    "rows of no bytes": (112, struct.pack("<I", 0)),
    "rows of 8 GiB": (112, struct.pack("<I", 1 << 30)),
    "units of another kind": (116, struct.pack("<I", 1)),
    "2**64 units": (104, struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF)),
    "no rows": (128, struct.pack("<I", 0)),
    "too many rows": (128, struct.pack("<I", 257)),
    "all the rows there are": (128, struct.pack("<I", 0xFFFFFFFF)),
    "no pages": (132, struct.pack("<I", 0)),
    "one page more": (132, struct.pack("<I", 13)),
    "all the pages there are": (132, struct.pack("<I", 0xFFFFFFFF)),
}


@pytest.mark.parametrize("lie", LIE)
def test_a_header_that_lies_under_a_right_checksum_is_an_integrity_error(lie):
    forged = resealed(stored(Kind.KV), *LIE[lie])
    with pytest.raises(IntegrityError):
        verify_object(memoryview(forged), name_of(Kind.KV))


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1.0])
def test_an_error_figure_that_is_none_is_an_integrity_error(eps):
    data = PREFIX.object(Kind.KV, 0, 130, provenance=Provenance.APPROXIMATE, depth=1, eps=0.5)
    with pytest.raises(IntegrityError, match="eps"):
        parse_header(resealed(data, 96, struct.pack("<f", eps)))


def test_bytes_behind_the_header_checksum_must_be_zero():
    data = bytearray(stored(Kind.KV))
    data[parse_header(data).header_bytes - 1] = 1
    with pytest.raises(IntegrityError, match="must be zero"):
        parse_header(data)


def test_huge_counts_take_no_memory():
    forged = [
        resealed(stored(Kind.KV), *LIE[lie])
        for lie in ("all the pages there are", "2**64 units", "all the rows there are")
    ]
    tracemalloc.start()
    try:
        for data in forged:
            with pytest.raises(IntegrityError):
                parse_header(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=400))
def test_random_bytes_are_an_integrity_error(data):
    with pytest.raises(IntegrityError):
        parse_header(b"TRPL\x02\x00" + data)


@given(st.integers(6, FIELDS_BYTES - 1), st.binary(min_size=1, max_size=8))
def test_forged_fields_are_an_integrity_error_or_no_change(offset, field):
    data = stored(Kind.CHECKPOINT)
    forged = resealed(data, offset, field)
    try:
        verify_object(memoryview(forged[: len(data)]), name_of(Kind.CHECKPOINT))
    except IntegrityError:
        return
    changed = {i for i in range(FIELDS_BYTES) if forged[i] != data[i]}
    # What only the writer can know: provenance with its figures, the dtypes' names, the position.
    assert changed <= {7, *range(92, 103)} or not changed


@pytest.mark.parametrize(
    ("geometry", "rows", "message"),
    [
        (Geometry(Kind.HIDDEN, Dtype.FLOAT32, (1, 1 << 13, 0, 0, 0, 0)), 64, "1048576"),
        (Geometry(Kind.HIDDEN, Dtype.NONE, (1, 8, 0, 0, 0, 0)), 64, "no shape of its kind"),
        (Geometry(Kind.HIDDEN, Dtype.FLOAT32, (1, 8, 1, 0, 0, 0)), 64, "no shape of its kind"),
        (Geometry(Kind.KV, Dtype.FLOAT32, (1, 8, 1, 0, 0, 0)), 64, "no shape of its kind"),
        (GEOMETRY[Kind.HIDDEN], 65, "65 rows, wanted 1 to 64"),
    ],
)
def test_an_object_that_no_reader_would_take_is_not_built(geometry, rows, message):
    header = Header(ObjectName(NAMESPACE, Kind.HIDDEN, bytes(32)), geometry, 0, rows, ())
    with pytest.raises(InvalidRequest, match=message):
        build_parts(header, [bytes(header.payload_bytes)])


def test_a_payload_of_another_size_is_not_built():
    header = Header(name_of(Kind.HIDDEN), GEOMETRY[Kind.HIDDEN], 64, 64, ())
    with pytest.raises(InvalidRequest, match="payload has 4095 bytes in 1 parts, wanted 4096"):
        build_parts(header, [bytes(4095)])


def test_a_payload_in_parts_of_whole_units_makes_the_same_object():
    geometry = hidden_geometry(sources=3, hidden_size=8, dtype=Dtype.FLOAT32)
    header = Header(name_of(Kind.HIDDEN), geometry, 64, 50, ())
    payload = bytes(i * 7 % 256 for i in range(header.payload_bytes))
    unit = len(payload) // 3
    parts = build_parts(header, [payload[:unit], payload[unit:]])
    assert b"".join(parts) == b"".join(build_parts(header, [payload]))
    with pytest.raises(InvalidRequest, match=r"in 2 parts, wanted 4800 .* of whole units"):
        build_parts(header, [payload[: unit - 1], payload[unit - 1 :]])


def test_rows_tell_their_prefix_unit_and_kind():
    """The tests' own payload: a row of another prefix, unit, kind or position is never equal."""
    other = Prefix(NAMESPACE, [9, *range(2, 131)])
    rows = {
        prefix.rows(kind, at, at + 1, unit, 1)[:32]
        for prefix in (PREFIX, other)
        for kind in Kind
        for at in range(130)
        for unit in range(2)
    }
    assert len(rows) == 2 * 3 * 130 * 2
    assert np.frombuffer(PREFIX.rows(Kind.KV, 0, 130), "<u8").size == 4 * 130 * 4
