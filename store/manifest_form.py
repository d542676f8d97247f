"""Manifests byte for byte: what is said of a block in Redis, and of each of its objects.

One hash per block. Its fields say what the block is and which of its objects are in Redis; a field
is written after the payload it speaks of, and taken away before it. A payload without its field
does not exist. The hash lives shorter than the payloads, so that what it names can be read.

    field       value
    b           first token, parent hash, page hashes, running digests
    k           the kv object
    0 to 3      the hidden object of that page, with its tail figures
    c<token>:<digest>  the checkpoint after <token> tokens, whose prefix ends in a block after this
                one; the last token's digest tells siblings apart

Every value ends with a seal over the key, the field and itself, so that a manifest that is damaged
or lies under another's key is a miss. No token ids and no salts are in it: a namespace is a digest,
tokens are running digests.

A block with a `kv` object is also a member of the sorted set of its parent's children, under the
parent's key and a `z`, by which other stores find it (`shared_index.py`). Where everything lies
says `placement.py`; what the way to a manifest does not tell of it stands in members and entries.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.chain import DIGEST_BYTES
from tailreplay.store.manifest_seal import MARKS
from tailreplay.store.objects import (
    KV_BLOCK_TOKENS,
    MAX_TAIL_FIGURES_BYTES,
    PAGE_TOKENS,
    TAIL_FIGURE_BYTES,
    Kind,
    Provenance,
)
from tailreplay.store.placement import SEGMENT_TOKENS
from tailreplay.store.tokens import MAX_TOKENS
from tailreplay.store.views import Block

if TYPE_CHECKING:
    from tailreplay.store.manifest_seal import Seal
    from tailreplay.store.record import Record

_BLOCK = struct.Struct("<IB32s")
_ENTRY = struct.Struct("<QB")
NAME_BYTES = 32
"""Bytes of a prefix hash, with which a child's member ends."""
NAMES_BYTES = 64
"""Bytes of a namespace and a prefix hash, with which a manifest's key ends."""
BLOCK_FIELD = b"b"
"""Field of a manifest that says what its block is; the others are of objects."""
_PAGE_BYTES = PAGE_TOKENS * DIGEST_BYTES
_MAX_PAGES = KV_BLOCK_TOKENS // PAGE_TOKENS
_MAX_OBJECT_BYTES = 1 << 40
"""More than any object has: a header holds checksums of 2^18 pages, of 1 MiB at most."""
_FIELD = re.compile(rb"k|[0-3]|c[0-9]{1,10}:[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a block that is in Redis.

    Attributes:
        field: which object, as in the module's table.
        size: its bytes, header included.
        provenance: exact or approximate.
        state_hash: prefix hash of a checkpoint; empty for other kinds.
        tail_figures: of a hidden object; may be empty.
        placed_by: of a checkpoint within the first block, which is not placed with its home.
        life_s: what was left of the manifest's life when it was read; 0 = not asked.
    """

    field: str
    size: int
    provenance: Provenance
    state_hash: bytes = b""
    tail_figures: bytes = b""
    placed_by: bytes = b""
    life_s: float = attribute(default=0.0, compare=False)

    @property
    def kind(self) -> Kind:
        """What the object holds."""
        if self.field.startswith("c"):
            return Kind.CHECKPOINT
        return Kind.KV if self.field == "k" else Kind.HIDDEN

    @property
    def page(self) -> int:
        """Number of a hidden object's page in its block."""
        return int(self.field)

    @property
    def end_token(self) -> int:
        """Tokens that a checkpoint has seen."""
        return int(self.field[1:].partition(":")[0])

    @property
    def state_digest(self) -> bytes:
        """Running digest of a checkpoint's last token."""
        return bytes.fromhex(self.field.partition(":")[2])


def entry_of(record: Record) -> Entry:
    """What a manifest must say of an object, so that it can be listed again."""
    kind, size, provenance = record.name.kind, record.size, record.provenance
    if kind is Kind.KV:
        return Entry("k", size, provenance)
    if kind is Kind.HIDDEN:
        page = record.first_token % KV_BLOCK_TOKENS // PAGE_TOKENS
        return Entry(str(page), size, provenance, tail_figures=record.tail_figures)
    field = f"c{record.end_token}:{record.digest.hex()}"
    alone = record.name.placed_by if record.end_token <= KV_BLOCK_TOKENS else b""
    return Entry(field, size, provenance, record.name.prefix_hash, placed_by=alone)


def manifest_key(key_prefix: str, namespace: bytes, prefix_hash: bytes) -> bytes:
    """Key of a block's manifest."""
    return key_prefix.encode() + b"m:" + namespace + prefix_hash


def children_key(parent_key: bytes) -> bytes:
    """Key of the sorted set of a block's children, from that of its manifest."""
    return parent_key + b"z"


class Member(NamedTuple):
    """A block among its parent's children.

    Attributes:
        digests: running digests of its tokens.
        placed_by: as of `Block`; empty = what its parent is placed by.
        prefix_hash: its name.
    """

    digests: bytes
    placed_by: bytes
    prefix_hash: bytes


def pack_member(block: Block) -> bytes:
    """A block as a member of the set of its parent's children."""
    alone = b"" if block.first_token % SEGMENT_TOKENS else block.called.placed_by
    return block.digests + alone + block.prefix_hash


def parsed_member(member: bytes, first_token: int) -> Member:
    """A member of a set of children that begin at a token."""
    rest, prefix_hash = member[:-NAME_BYTES], member[-NAME_BYTES:]
    if first_token % SEGMENT_TOKENS:
        return Member(rest, b"", prefix_hash)
    return Member(rest[:-NAME_BYTES], rest[-NAME_BYTES:], prefix_hash)


def parsed_manifest(
    key: bytes,
    names: bytes,
    fields: dict[bytes, bytes],
    seal: Seal = MARKS,
    placed_by: bytes = b"",
) -> tuple[Block, list[Entry]] | None:
    """A manifest as Redis gives it; None when it is absent or damaged, which makes it a miss.

    Args:
        key: its whole key.
        names: namespace and prefix hash of its block.
        fields: of the hash.
        seal: the form of its values.
        placed_by: what says where it was found, for its block.
    """
    values = {field: seal.unwrap(key, field, stored) for field, stored in fields.items()}
    return _unpack(names, {field: v for field, v in values.items() if v is not None}, placed_by)


def literal(text: bytes) -> bytes:
    """A pattern of Redis that stands for itself."""
    return b"".join(b"\\" + bytes([c]) if c in b"\\*?[]^-" else bytes([c]) for c in text)


def pack_block(block: Block) -> bytes:
    """Field `b`, without its seal."""
    head = _BLOCK.pack(block.first_token, len(block.page_hashes), block.parent_hash)
    return head + b"".join(block.page_hashes) + block.digests


def pack_entry(entry: Entry) -> bytes:
    """An object's field, without its seal."""
    packed = _ENTRY.pack(entry.size, entry.provenance)
    return packed + entry.state_hash + entry.placed_by + entry.tail_figures


def _unpack(
    names: bytes, fields: dict[bytes, bytes], placed_by: bytes
) -> tuple[Block, list[Entry]] | None:
    """A manifest read back; None when it is damaged, which makes it a miss."""
    try:
        first, pages, parent = _BLOCK.unpack_from(fields[BLOCK_FIELD])
        at = _BLOCK.size + 32 * pages
        hashes = tuple(fields[BLOCK_FIELD][i : i + 32] for i in range(_BLOCK.size, at, 32))
        digests = fields[BLOCK_FIELD][at:]
        block = Block(names[:32], names[32:], parent, first, digests, hashes, placed_by)
        whole = len(block.digests) % DIGEST_BYTES == 0
        if len(names) != NAMES_BYTES or pages > _MAX_PAGES or not whole:
            return None
        if pages != -(-len(block.digests) // _PAGE_BYTES):
            return None
        return block, [_entry(k, v) for k, v in fields.items() if k != BLOCK_FIELD]
    except (KeyError, ValueError, struct.error):
        return None


def _entry(field: bytes, value: bytes) -> Entry:
    if not _FIELD.fullmatch(field):
        raise ValueError(f"field {field!r}, wanted one of the module's table")
    size, provenance = _ENTRY.unpack_from(value)
    if not 0 < size <= _MAX_OBJECT_BYTES:
        raise ValueError(f"field {field!r} is of {size} bytes, wanted 1 to {_MAX_OBJECT_BYTES}")
    entry, more = Entry(field.decode("ascii"), size, Provenance(provenance)), value[_ENTRY.size :]
    if entry.kind is Kind.CHECKPOINT:
        hashes = 2 if entry.end_token <= KV_BLOCK_TOKENS else 1
        if not 0 < entry.end_token <= MAX_TOKENS or len(more) != hashes * NAME_BYTES:
            raise ValueError(f"field {field!r} has {len(more)} bytes of a checkpoint's names")
        return replace(entry, state_hash=more[:NAME_BYTES], placed_by=more[NAME_BYTES:])
    if entry.kind is Kind.HIDDEN:
        if len(more) > MAX_TAIL_FIGURES_BYTES or len(more) % TAIL_FIGURE_BYTES:
            raise ValueError(f"field {field!r} has {len(more)} bytes of tail figures")
        return replace(entry, tail_figures=more)
    return entry
