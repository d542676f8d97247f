"""Hidden rows of the replay sources, collected forward by forward."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class HiddenRows:
    """Collects what each replay source put out, in token order.

    Not thread-safe: one forward at a time adds to it. Rows that came at once are not copied.
    """

    def __init__(self) -> None:
        # Mutable state: per source, the pieces [t, D] in the order they were added.
        self._pieces: defaultdict[int, list[Tensor]] = defaultdict(list)

    def add(self, source: int, rows: Tensor) -> None:
        """Append `rows` `[t, D]` of FA layer `source`; kept detached and not copied."""
        self._pieces[source].append(rows.detach())

    def rows(self, source: int) -> Tensor:
        """Return all rows of FA layer `source` so far, `[T, D]`, in the dtype they came in.

        Raises:
            ValueError: nothing was added for `source`.
        """
        if source not in self._pieces:
            raise ValueError(f"no rows of source {source}, wanted one of {sorted(self._pieces)}")
        pieces = self._pieces[source]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
