"""States that vLLM has cached itself, held while a load starts from them.

vLLM leaves the block of such a state out of the table of a request that loads more than its own
hit, and may hand it out again. So it is found in vLLM's own index, and pinned there until the load
is over. Scheduler's thread only.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LocalState:
    """A state at the end of a local hit.

    Attributes:
        blocks: vLLM's block per kv-cache group; None for FA groups.
        names: what vLLM called each block's content when it was found.
    """

    blocks: tuple[Any, ...]
    names: tuple[Any, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Block per kv-cache group; -1 for FA groups."""
        return tuple(-1 if block is None else int(block.block_id) for block in self.blocks)


class LocalStates:
    """Finds and pins.

    Args:
        manager: vLLM's KVCacheManager.
        state_sizes: tokens that a state block stands for, per kv-cache group, as `state_sizes`
            of `vllm_model`.
    """

    def __init__(self, manager: Any, state_sizes: Sequence[int]) -> None:
        self._manager = manager
        self._sizes = state_sizes
        self._held: dict[str, list[Any]] = {}

    def find(self, request: Any, local_tokens: int) -> LocalState | None:
        """The state at the end of the request's local hit; nothing is pinned yet."""
        groups, found_tokens, _ = self._manager.get_computed_blocks(request)
        if found_tokens != local_tokens:
            return None
        blocks = tuple(
            group[local_tokens // size - 1] if size > 0 and local_tokens % size == 0 else None
            for group, size in zip(groups.blocks, self._sizes, strict=True)
        )
        wanted = [b for b, size in zip(blocks, self._sizes, strict=True) if size >= 0]
        if any(block is None or block.is_null for block in wanted):
            return None
        return LocalState(blocks, tuple(None if b is None else b.block_hash for b in blocks))

    def hold(self, request_id: str, state: LocalState) -> bool:
        """Pins a state until `release`; False if vLLM has given a block away since."""
        pairs = zip(state.blocks, state.names, strict=True)
        if any(b is not None and (n is None or b.block_hash != n) for b, n in pairs):
            return False
        blocks = [block for block in state.blocks if block is not None]
        self._manager.block_pool.touch(blocks)
        self._held[request_id] = blocks
        return True

    def release(self, request_id: str) -> None:
        """Unpins what is held for a request, if anything is."""
        blocks = self._held.pop(request_id, None)
        if blocks:
            self._manager.block_pool.free_blocks(blocks)

    def __len__(self) -> int:
        """Requests for which a state is held."""
        return len(self._held)
