"""Which path carries what from a prefix to its questions: the states of GDN, or the KV of FA.

The prefix is prefilled as it is. Behind it either path is cut, or both: the states are emptied, or
FA sees no further back than a few tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mini.forward import Net, Stored, extend
from mini.tasks import TASKS, Corpus, Load, Sample

WINDOW = 4
"""Tokens that FA still sees where it may not look back into the prefix."""

PATHS = {
    "both": (True, True),
    "FA alone": (False, True),
    "states alone": (True, False),
    "neither": (False, False),
}
"""Column -> whether the states are kept, and whether FA sees all of the prefix."""


def table(model: Net, corpus: Corpus, lengths: Sequence[int], samples: int = 32) -> Iterator[str]:
    """Lines of a Markdown table: share of right answers with each path cut, by task and length."""
    yield f"| task | tokens | n | {' | '.join(PATHS)} |"
    yield "|---|---|---|" + "---|" * len(PATHS)
    for length in lengths:
        keys = length // 32
        for name, task, load in (
            ("needles in text", "needles", Load(length, keys, 4)),
            ("needles packed", "needles", Load(length, 0, 8, packed=True)),
            ("tracking", "track", Load(length, keys, 4, hops=1)),
            ("common words", "common", Load(length, 0, 1)),
        ):
            found = carried(model, corpus, task, load, samples)
            n = len(found["both"])
            cells = " | ".join(f"{hits.float().mean().item():.3f}" for hits in found.values())
            yield f"| {name} | {length} | {n} | {cells} |"


@torch.no_grad()
def carried(model: Net, corpus: Corpus, task: str, load: Load, samples: int) -> dict[str, Tensor]:
    """Whether each answer is the most probable token `[n]`, by column of `PATHS`."""
    rng = np.random.default_rng(2)
    rows = [TASKS[task](corpus, rng, load) for _ in range(samples)]
    batch = max(1, 8192 // load.length)
    hits: dict[str, list[Tensor]] = {name: [] for name in PATHS}
    for i in range(0, len(rows), batch):
        for name, found in _hits(model, rows[i : i + batch]):
            hits[name].append(found)
    return {name: torch.cat(found) for name, found in hits.items()}


def _hits(model: Net, rows: list[Sample]) -> Iterator[tuple[str, Tensor]]:
    ids = torch.from_numpy(np.stack([row.ids for row in rows]))
    m = rows[0].boundary
    answer = torch.from_numpy(np.stack([row.answer for row in rows]))[:, m + 1 :]
    stored = extend(model, ids[:, :m], None)[1]
    for name, (states, all_kv) in PATHS.items():
        past = Stored(stored.kv, {}, stored.states if states else {})
        out, _ = extend(model, ids[:, m:], past, window=None if all_kv else WINDOW)
        guess = model.lm_head(out[:, :-1]).argmax(-1)
        yield name, (guess == ids[:, m + 1 :])[answer]
