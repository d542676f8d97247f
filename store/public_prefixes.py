"""Which prefixes of the public scope are open to tenants: those that operators have registered."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailreplay.store.objects import KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailreplay.store.prompt import Prompt


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A registered prefix of whole blocks.

    Attributes:
        namespace: of the public scope, as the store keeps it.
        blocks: names of its blocks, in order; at least one.
        added_at_s: seconds since the epoch.
    """

    namespace: bytes
    blocks: tuple[bytes, ...]
    added_at_s: float

    @property
    def prefix_hash(self) -> bytes:
        """Its name."""
        return self.blocks[-1]

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.blocks) * KV_BLOCK_TOKENS


class PublicPrefixes:
    """The registered prefixes. Thread-safe."""

    def __init__(self) -> None:
        # Guarded by _lock: the prefixes by name, and by namespace how many have each block.
        self._lock = threading.Lock()
        self._prefixes: dict[bytes, PublicPrefix] = {}
        self._blocks: dict[bytes, Counter[bytes]] = {}

    def set(self, prefixes: Iterable[PublicPrefix]) -> None:
        """Registers these, and nothing else."""
        known = {prefix.prefix_hash: prefix for prefix in prefixes}
        blocks: dict[bytes, Counter[bytes]] = {}
        for prefix in known.values():
            blocks.setdefault(prefix.namespace, Counter()).update(prefix.blocks)
        with self._lock:
            self._prefixes, self._blocks = known, blocks

    def add(self, prefix: PublicPrefix) -> None:
        """Registers one; what has its name gives way."""
        self.set([*(p for p in self.all() if p.prefix_hash != prefix.prefix_hash), prefix])

    def remove(self, prefix_hash: bytes) -> None:
        """Takes one back."""
        self.set([p for p in self.all() if p.prefix_hash != prefix_hash])

    def get(self, prefix_hash: bytes) -> PublicPrefix | None:
        """The one of that name."""
        with self._lock:
            return self._prefixes.get(prefix_hash)

    def all(self) -> list[PublicPrefix]:
        """Every one, the oldest first."""
        with self._lock:
            return sorted(self._prefixes.values(), key=lambda prefix: prefix.added_at_s)

    def has(self, namespace: bytes, block: bytes) -> bool:
        """Whether a block is in a registered prefix, and so are all before it."""
        blocks = self._blocks.get(namespace)
        return blocks is not None and block in blocks

    def has_any(self, namespace: bytes) -> bool:
        """Whether anything of a namespace is registered."""
        return namespace in self._blocks

    def open_tokens(self, namespace: bytes, prompt: Prompt) -> int:
        """Leading tokens of a prompt, in whole blocks, that a registered prefix has.

        Args:
            namespace: of the public scope.
            prompt: the prompt, in whichever scope; names prefixes alike in all.
        """
        end = 0
        while end + KV_BLOCK_TOKENS <= len(prompt) and self.has_any(namespace):
            if not self.has(namespace, prompt.chain.prefix_hash(end + KV_BLOCK_TOKENS)):
                break
            end += KV_BLOCK_TOKENS
        return end
