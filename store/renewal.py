"""Gives blocks that are still used another life in Redis, before they expire.

What a manifest names is renewed first, and the manifest after it, so that a manifest never outlives
its payloads. What is not there any more is taken out of the manifest in place of that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tailreplay.store.objects import Kind, ObjectName
from tailreplay.store.views import BlockName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.store.manifest import Manifests
    from tailreplay.store.manifest_form import Entry
    from tailreplay.store.views import Block

logger = logging.getLogger(__name__)


class Renewal:
    """Renews blocks; every call does I/O.

    Args:
        manifests: where they are.
        renew_payloads: gives payloads a new life; says for each whether it is there, None for those
            that can not be asked for now.
    """

    def __init__(
        self,
        manifests: Manifests,
        renew_payloads: Callable[[Sequence[ObjectName]], Sequence[bool | None]],
    ) -> None:
        self._manifests = manifests
        self._renew_payloads = renew_payloads

    def renew(self, blocks: Sequence[BlockName]) -> list[BlockName]:
        """Renew blocks with all that their manifests name; returns those that have a new life."""
        found = self._manifests.read(blocks)
        names = [
            (block, entry, name_of(block, entry)) for block, entries in found for entry in entries
        ]
        there = self._renew_payloads([name for *_, name in names])
        unsure, gone = set[BlockName](), []
        for (block, entry, _), is_there in zip(names, there, strict=True):
            if is_there is None:
                unsure.add(block.called)
            elif not is_there:
                gone.append((block.called, entry.field))
        if gone:
            logger.debug("%d payloads had gone before their manifests", len(gone))
            self._manifests.forget(gone)
        return self._manifests.renew([b for b, _ in found if b.called not in unsure])


def name_of(block: Block, entry: Entry) -> ObjectName:
    """Return the object that an entry of a block's manifest speaks of."""
    prefix_hash = block.prefix_hash
    if entry.kind is Kind.CHECKPOINT:
        prefix_hash = entry.state_hash
    elif entry.kind is Kind.HIDDEN:
        prefix_hash = block.page_hashes[entry.page]
    return ObjectName(block.namespace, entry.kind, prefix_hash, entry.placed_by or block.placed_by)
