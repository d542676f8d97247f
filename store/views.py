"""What the index shows of itself: blocks, matches, and the objects along a path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tailreplay.store.objects import Kind

if TYPE_CHECKING:
    from tailreplay.store.record import Record
    from tailreplay.store.runs import Run
    from tailreplay.store.trees import Trees


class BlockName(NamedTuple):
    """What a block's manifest is called by, and placed by."""

    namespace: bytes
    prefix_hash: bytes
    placed_by: bytes


@dataclass(frozen=True, slots=True)
class Node:
    """A block of the tree, to be used under the store's lock alone.

    Attributes:
        trees: whose.
        row: which.
    """

    trees: Trees
    row: int

    @property
    def prefix_hash(self) -> bytes:
        """Name of the prefix that ends with it."""
        return self.trees.name(self.row)

    def called(self, namespace: bytes) -> BlockName:
        """What its manifest is called by, in its namespace."""
        return BlockName(namespace, self.prefix_hash, self.trees.placed_by(self.row))

    @property
    def first_token(self) -> int:
        """Position of its first token."""
        return self.trees.blocks.firsts[self.row]

    @property
    def tokens(self) -> int:
        """Tokens in it."""
        return self.trees.blocks.lengths[self.row]

    @property
    def end_token(self) -> int:
        """One past the position of its last token."""
        return self.trees.blocks.end(self.row)

    @property
    def kv(self) -> Record | None:
        """Its `kv` object; None for the root of a namespace."""
        return next(iter(self.trees.records_of([self.row], Kind.KV)), None)

    @property
    def hidden(self) -> list[Record]:
        """Its `hidden` objects, one per page, shared with siblings that share the page."""
        return list(self.trees.records_of([self.row], Kind.HIDDEN))

    @property
    def has_kv(self) -> bool:
        """Whether its KV exists in some tier."""
        return self.trees.has_kv(self.row)


@dataclass(frozen=True, slots=True)
class Block:
    """A block as a manifest describes it.

    Attributes:
        namespace: 32 bytes.
        prefix_hash: its name.
        parent_hash: name of the block before it; of the root for the first.
        first_token: position of its first token.
        digests: running digests of its tokens.
        page_hashes: prefix hash at the end of each of its pages.
        placed_by: prefix hash that says which server has its manifest; empty = not known.
    """

    namespace: bytes
    prefix_hash: bytes
    parent_hash: bytes
    first_token: int
    digests: bytes
    page_hashes: tuple[bytes, ...]
    placed_by: bytes = field(default=b"", compare=False)

    @property
    def called(self) -> BlockName:
        """What its manifest is called by."""
        return BlockName(self.namespace, self.prefix_hash, self.placed_by or self.prefix_hash)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a request.

    Attributes:
        matched_tokens: its length.
        trees: where.
        rows: blocks from the first to the deepest that shares a token.
        leaf: name of the deepest; empty when nothing matched.
        checkpoints: records of states that belong to prefixes of it, ascending by token.
        runs: what exists along it, by kind, then by first token.
    """

    matched_tokens: int
    trees: Trees
    rows: tuple[int, ...] = ()
    leaf: bytes = b""
    checkpoints: tuple[Record, ...] = ()
    runs: tuple[Run, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Leading tokens whose keys and values exist."""
        end = 0
        for run in self.runs:
            if run.kind is Kind.KV and run.first_token == end:
                end = run.end_token
        return end

    @property
    def path(self) -> list[Node]:
        """The blocks; to be used under the store's lock alone."""
        return [Node(self.trees, row) for row in self.rows]


class Path(NamedTuple):
    """The objects along a path, by kind, ascending by token; a snapshot that outlives the lock."""

    kv: tuple[Record, ...] = ()
    hidden: tuple[Record, ...] = ()

    def of(self, kind: Kind) -> tuple[Record, ...]:
        """Those of one kind; a path has no checkpoints."""
        return {Kind.KV: self.kv, Kind.HIDDEN: self.hidden}.get(kind, ())
