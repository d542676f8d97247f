"""The token index: the longest stored prefix of a request, at any token.

A namespace is a tree of blocks of at most 256 tokens. The children of a block are kept sorted by
their running digests, and the longest common prefix of a sequence with a sorted set is always with
one of its two neighbours there; so a match costs O(log siblings) per level at any fan-out, and
whole blocks on the way down are dictionary hits. The tree says what prefixes are known; each
record in it says which payload of them exists, and where.

Nothing here does I/O or locks: the store calls it under its own lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from tailreplay.store.chain import DIGEST_BYTES, common_tokens
from tailreplay.store.objects import KV_BLOCK_TOKENS, PAGE_TOKENS, Kind, ObjectName, Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK_BYTES = KV_BLOCK_TOKENS * DIGEST_BYTES
_TIES = 8
"""Siblings on each side that are looked at for one that shares as many tokens and has KV."""


@dataclass(eq=False, slots=True)
class Record:
    """One object the index knows.

    Attributes:
        name: its key in every tier.
        first_token: position of its first row.
        rows: rows it has.
        size: bytes with header; 0 until it has been stored.
        provenance: exact or approximate.
        in_cpu: whether the CPU tier has it.
        in_redis: whether Redis has it, manifest included.
        nodes: the blocks that list it; siblings share the hidden pages they have in common. For a
            checkpoint the block before the one in which its prefix ends.
        digest: running digest of a checkpoint's last token; empty for other kinds.
        tail_figures: of a hidden page, how long a tail must be that ends in it; may be empty.
    """

    name: ObjectName
    first_token: int
    rows: int
    nodes: list[Node]
    size: int = 0
    provenance: Provenance = Provenance.EXACT
    in_cpu: bool = False
    in_redis: bool = False
    digest: bytes = b""
    tail_figures: bytes = b""

    @property
    def exists(self) -> bool:
        """Whether any tier has it."""
        return self.in_cpu or self.in_redis

    @property
    def end_token(self) -> int:
        """One past its last row."""
        return self.first_token + self.rows


_digests: Callable[[Node], bytes] = attrgetter("digests")
_NO_CHILDREN: list[Node] = []
_NO_CHECKPOINTS: dict[bytes, Record] = {}


@dataclass(eq=False, slots=True)
class Node:
    """A block of the tree; the root has no tokens and no parent.

    Attributes:
        prefix_hash: name of the prefix that ends with this block.
        first_token: position of the block's first token.
        digests: running digests of its tokens.
        parent: the block before it.
        kv: its `kv` object.
        hidden: its `hidden` objects, one per page, shared with siblings that share the page.
    """

    prefix_hash: bytes
    first_token: int
    digests: bytes
    parent: Node | None
    kv: Record | None = None
    hidden: list[Record] = field(default_factory=list)
    # Children sorted by their digests. Most blocks have one child or none, so an empty list is
    # shared until there is one.
    _children: list[Node] = field(default_factory=lambda: _NO_CHILDREN)
    # Checkpoints of prefixes that end inside or at the end of a child block, by their last digest:
    # every sibling that shares the prefix finds them here. An empty one is shared as well.
    checkpoints: dict[bytes, Record] = field(default_factory=lambda: _NO_CHECKPOINTS)

    @property
    def tokens(self) -> int:
        """Tokens in the block."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def end_token(self) -> int:
        """One past the position of its last token."""
        return self.first_token + self.tokens

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs below it."""
        return not self._children and not self.checkpoints

    @property
    def has_kv(self) -> bool:
        """Whether its KV exists in some tier."""
        return self.kv is not None and self.kv.exists

    def child(self, digests: bytes) -> Node | None:
        """The child with exactly these digests."""
        at = bisect_left(self._children, digests, key=_digests)
        found = self._children[at] if at < len(self._children) else None
        return found if found is not None and found.digests == digests else None

    def nearest(self, digests: bytes) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `digests`, and how many; (None, 0).

        Of those that share equally many, which lie side by side, the nearest with KV is taken.
        """
        at = bisect_left(self._children, digests, key=_digests)
        around = self._children[max(at - 1, 0) : at + 1]
        shared = max((common_tokens(child.digests, digests) for child in around), default=0)
        if not shared:
            return None, 0
        prefix = digests[: shared * DIGEST_BYTES]
        tied = [
            child
            for child in self._children[max(at - _TIES, 0) : at + _TIES]
            if child.digests.startswith(prefix)
        ]
        return next((child for child in tied if child.has_kv), tied[0]), shared

    def before(self, child: Node) -> Node | None:
        """The longest shorter child whose tokens `child` begins with.

        Sorted order puts it anywhere before, with other extensions between, so its own extensions
        are skipped back over; at most one step per shorter length.
        """
        at = bisect_left(self._children, child.digests, key=_digests)
        while at:
            at -= 1
            other = self._children[at]
            if child.digests.startswith(other.digests):
                return other
            shared = common_tokens(other.digests, child.digests) * DIGEST_BYTES
            if not shared:
                return None
            wanted = child.digests[:shared]
            at = bisect_left(self._children, wanted, 0, at, key=_digests)
            if self._children[at].digests == wanted:
                return self._children[at]
        return None

    def add(self, child: Node) -> None:
        """Hangs a new block below this one."""
        if self._children is _NO_CHILDREN:
            self._children = []
        insort(self._children, child, key=_digests)

    def remove(self, child: Node) -> None:
        """Takes a leaf away."""
        del self._children[bisect_left(self._children, child.digests, key=_digests)]

    def keep(self, checkpoint: Record) -> None:
        """Lists a checkpoint of a prefix that ends in a child block."""
        if self.checkpoints is _NO_CHECKPOINTS:
            self.checkpoints = {}
        self.checkpoints[checkpoint.digest] = checkpoint

    def children(self) -> Iterator[Node]:
        """Its children, sorted by digests."""
        return iter(self._children)


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
    """

    namespace: bytes
    prefix_hash: bytes
    parent_hash: bytes
    first_token: int
    digests: bytes
    page_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a request.

    Attributes:
        matched_tokens: its length.
        path: blocks from the first to the deepest that shares a token.
        checkpoints: records of states that belong to prefixes of it, ascending by token.
    """

    matched_tokens: int
    path: tuple[Node, ...]
    checkpoints: tuple[Record, ...]


class TokenIndex:
    """All namespaces' trees, and every record by name."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[tuple[bytes, bytes], Node] = {}
        self._records: dict[ObjectName, Record] = {}
        self._blocks: Counter[bytes] = Counter()
        self._tokens: Counter[bytes] = Counter()

    def match(self, namespace: bytes, digests: bytes) -> Match:
        """Longest stored prefix of a sequence, given its running digests."""
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, (), ())
        node, path, checkpoints = root, [], []
        matched = 0
        while matched * DIGEST_BYTES < len(digests):
            start = matched * DIGEST_BYTES
            block = digests[start : start + _BLOCK_BYTES]
            child, shared = node.child(block), len(block) // DIGEST_BYTES
            if child is None or not child.has_kv:
                # A sibling that goes on from an evicted partial block may have its KV.
                child, shared = node.nearest(block)
            if node.checkpoints:
                checkpoints += _checkpoints_on(node, block[: shared * DIGEST_BYTES])
            if child is None:
                break
            path.append(child)
            matched += shared
            if shared < KV_BLOCK_TOKENS:
                break
            node = child
        return Match(matched, tuple(path), tuple(checkpoints))

    def insert(
        self,
        namespace: bytes,
        digests: bytes,
        prefix_hash: Callable[[int], bytes],
    ) -> Node:
        """Makes sure every block of a sequence is in the tree; returns the last, or the root.

        Args:
            namespace: 32 bytes.
            digests: running digests of the sequence.
            prefix_hash: name of the sequence's first n tokens.
        """
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(prefix_hash(0), 0, b"", None)
        for start in range(0, len(digests), _BLOCK_BYTES):
            block = digests[start : start + _BLOCK_BYTES]
            child = node.child(block)
            if child is None:
                child = self._add(node, _block(namespace, node, block, prefix_hash))
            node = child
        return node

    def restore(self, block: Block) -> Node | None:
        """Puts a block back that a manifest describes; None when the block before it is unknown.

        Blocks come in order of `first_token`. The root of a namespace has no digests.
        """
        namespace = block.namespace
        if not block.digests:
            return self._roots.setdefault(namespace, Node(block.prefix_hash, 0, b"", None))
        parent = self._nodes.get((namespace, block.parent_hash))
        if parent is None and block.first_token == 0:
            parent = self._roots.setdefault(namespace, Node(block.parent_hash, 0, b"", None))
        if parent is None or parent.end_token != block.first_token:
            return None
        return parent.child(block.digests) or self._add(parent, block)

    def block(self, namespace: bytes, node: Node) -> Block:
        """What a manifest must say of a node, so that `restore` can put it back."""
        parent_hash = node.parent.prefix_hash if node.parent is not None else b""
        pages = tuple(record.name.prefix_hash for record in node.hidden)
        return Block(
            namespace, node.prefix_hash, parent_hash, node.first_token, node.digests, pages
        )

    def extended_by(self, node: Node) -> Node | None:
        """The longest shorter sibling that this block goes on from, if there is one."""
        return node.parent.before(node) if node.parent is not None else None

    def record(self, name: ObjectName) -> Record | None:
        """The record of an object, whether or not its payload exists now."""
        return self._records.get(name)

    def path_to(self, namespace: bytes, leaf: bytes) -> tuple[Node, ...]:
        """Blocks from the first to the one named `leaf`; empty when it is not known."""
        node = self._nodes.get((namespace, leaf))
        path = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return tuple(reversed(path))

    def checkpoint(self, parent: Node, name: ObjectName, end_token: int, digest: bytes) -> Record:
        """The record of a state that ends in a block below `parent`; made if it is new."""
        record = self._records.get(name)
        if record is None:
            record = Record(name, end_token - 1, 1, [parent], digest=digest)
            self._records[name] = record
            parent.keep(record)
        return record

    def prune(self, record: Record) -> None:
        """Forgets what hangs on a record without payload: itself, and blocks that hold nothing."""
        if record.exists or self._records.get(record.name) is not record:
            return
        if record.name.kind is Kind.CHECKPOINT:
            del self._records[record.name]
            del record.nodes[0].checkpoints[record.digest]
        for node in tuple(record.nodes):
            at: Node | None = node
            while at is not None and at.parent is not None and _is_empty(at):
                self._drop(at)
                at = at.parent

    def prune_block(self, namespace: bytes, prefix_hash: bytes) -> None:
        """Forgets a block, and those before it, if they hold nothing."""
        node = self._nodes.get((namespace, prefix_hash))
        if node is not None and node.kv is not None:
            self.prune(node.kv)

    def sizes(self) -> dict[bytes, tuple[int, int]]:
        """Blocks of each namespace with a tree, and their tokens."""
        return {space: (self._blocks[space], self._tokens[space]) for space in self._roots}

    def records(self) -> Iterator[Record]:
        """Every record."""
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def _add(self, parent: Node, block: Block) -> Node:
        first, rows = block.first_token, len(block.digests) // DIGEST_BYTES
        namespace = block.namespace
        node = Node(block.prefix_hash, first, block.digests, parent)
        node.kv = self._listed(ObjectName(namespace, Kind.KV, node.prefix_hash), first, rows, node)
        for at, page_hash in zip(range(0, rows, PAGE_TOKENS), block.page_hashes, strict=True):
            name = ObjectName(namespace, Kind.HIDDEN, page_hash)
            page = self._listed(name, first + at, min(PAGE_TOKENS, rows - at), node)
            node.hidden.append(page)
        parent.add(node)
        self._nodes[namespace, node.prefix_hash] = node
        self._blocks[namespace] += 1
        self._tokens[namespace] += node.tokens
        return node

    def _listed(self, name: ObjectName, first_token: int, rows: int, node: Node) -> Record:
        """The record of that name, made if it is new, with `node` among its blocks."""
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = Record(name, first_token, rows, [])
        record.nodes.append(node)
        return record

    def _drop(self, node: Node) -> None:
        if node.parent is None or node.kv is None:
            raise ValueError("the root of a namespace can not be dropped")
        node.parent.remove(node)
        namespace = node.kv.name.namespace
        del self._nodes[namespace, node.prefix_hash]
        self._blocks[namespace] -= 1
        self._tokens[namespace] -= node.tokens
        for record in (node.kv, *node.hidden):
            record.nodes.remove(node)
            if not record.nodes:
                del self._records[record.name]


def _block(
    namespace: bytes, parent: Node, digests: bytes, prefix_hash: Callable[[int], bytes]
) -> Block:
    first, end = parent.end_token, parent.end_token + len(digests) // DIGEST_BYTES
    pages = (min(page + PAGE_TOKENS, end) for page in range(first, end, PAGE_TOKENS))
    return Block(
        namespace,
        prefix_hash(end),
        parent.prefix_hash,
        first,
        digests,
        tuple(prefix_hash(page_end) for page_end in pages),
    )


def _is_empty(node: Node) -> bool:
    """Whether nothing hangs below a block and no payload would go with it."""
    own = any(record.exists and len(record.nodes) == 1 for record in node.hidden)
    return node.is_leaf and not node.has_kv and not own


def _checkpoints_on(parent: Node, digests: bytes) -> list[Record]:
    """Checkpoints below `parent` on a sequence that goes on with `digests`, ascending by token."""
    found = []
    for at in range(0, len(digests), DIGEST_BYTES):
        record = parent.checkpoints.get(digests[at : at + DIGEST_BYTES])
        if record is not None and record.exists:
            found.append(record)
    return found
