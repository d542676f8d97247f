"""Scores of a miniature: full prefill, states zeroed at the boundary, or replayed from a tail."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini.forward import Memory, Net, Stored, extend, hidden_states, replay
from mini.model import half_lives
from mini.tasks import TASKS, Corpus, Load, Sample

RATIOS = {"full": None, "zero": 0.0, "tail20": 0.2}
"""Column -> share of the prefix replayed; None keeps the states of the prefill."""


@torch.no_grad()
def recall(
    model: Net,
    corpus: Corpus,
    task: str,
    load: Load,
    samples: int = 32,
    speedup: float | None = 1.0,
) -> dict[str, float]:
    """Share of answers that are the most probable token, by column of `RATIOS`."""
    rng = np.random.default_rng(1)
    rows = [TASKS[task](corpus, rng, load) for _ in range(samples)]
    rows = [row for row in rows if row.boundary == rows[0].boundary]
    batch = max(1, 8192 // load.length)
    hits: dict[str, list[Tensor]] = {}
    for i in range(0, len(rows), batch):
        for name, found in _hits(model, rows[i : i + batch], speedup).items():
            hits.setdefault(name, []).append(found)
    return {name: torch.cat(found).float().mean().item() for name, found in hits.items()}


@torch.no_grad()
def text_loss(model: Net, corpus: Corpus, length: int = 512, speedup: float | None = 1.0) -> float:
    """Mean loss in nats a token on held-back text, over the second half of each passage."""
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(
        np.stack([corpus.passage(rng, length, held_back=True) for _ in range(16)])
    )
    half = length // 2
    logits = model.lm_head(hidden_states(model, ids, Memory(None, speedup))[:, half - 1 : -1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, half:].flatten()).item()


@torch.no_grad()
def continuation(
    model: Net, corpus: Corpus, m: int, samples: int = 32, ahead: int = 16
) -> dict[str, tuple[float, float]]:
    """Held-back text after a prefix of `m` tokens: agreement with full, and loss, by column.

    Returns:
        Column -> share of the next `ahead` tokens at which the most probable token is the one of
        a full prefill, and mean loss in nats a token.
    """
    rng = np.random.default_rng(1)
    rows = np.stack([corpus.passage(rng, m + ahead + 1, held_back=True) for _ in range(samples)])
    ids = torch.from_numpy(rows)
    logits: dict[str, list[Tensor]] = {name: [] for name in RATIOS}
    for part in ids.split(max(1, 8192 // m)):
        for name, out in _columns(model, part[:, :-1], m, 1.0):
            logits[name].append(model.lm_head(out))
    joined = {name: torch.cat(parts) for name, parts in logits.items()}
    top = joined["full"].argmax(-1)
    return {
        name: (
            (found.argmax(-1) == top).float().mean().item(),
            F.cross_entropy(found.flatten(0, 1), ids[:, m + 1 :].flatten()).item(),
        )
        for name, found in joined.items()
    }


def table(model: Net, corpus: Corpus, longest: int = 2048) -> Iterator[str]:
    """Lines of a Markdown table: every task at several lengths, then held-back text."""
    yield f"| task | tokens | {' | '.join(RATIOS)} |"
    yield "|---|---|" + "---|" * len(RATIOS)
    length = 128
    while length <= longest:
        keys = length // 32
        for name, task, load in (
            ("needles, packed", "needles", Load(length, 0, 8, packed=True)),
            (f"needles, {keys} keys in text", "needles", Load(length, keys, 4)),
            (f"tracking, chains of 3, {keys // 3}", "track", Load(length, keys, 4, hops=2)),
            ("common words", "common", Load(length, 0, 1)),
        ):
            found = recall(model, corpus, task, load, 32 if length < 1024 else 16)
            yield f"| {name} | {length} | {' | '.join(f'{x:.3f}' for x in found.values())} |"
        found = continuation(model, corpus, length, samples=16).values()
        cells = " | ".join(f"{same:.3f}, {loss:.2f}" for same, loss in found)
        yield f"| text: top token as in full, loss | {length} | {cells} |"
        length *= 2


def lives(model: Net) -> Iterator[str]:
    """Lines of a Markdown table: half-lives of the GDN heads in tokens, layer by layer."""
    yield "| GDN layer | half-lives of its heads, tokens |"
    yield "|---|---|"
    for layer, heads in enumerate(half_lives(model), 1):
        yield f"| {layer} | {', '.join(f'{life:.3g}' for life in heads)} |"


def _columns(
    model: Net, ids: Tensor, m: int, speedup: float | None
) -> Iterator[tuple[str, Tensor]]:
    """Final hidden states of `ids` from `m` on, for each way of getting the states at `m`."""
    _, stored = extend(model, ids[:, :m], None, speedup)
    for name, ratio in RATIOS.items():
        states = stored.states
        if ratio is not None:
            states = replay(model, stored.hidden, round(ratio * m), speedup)
        yield name, extend(model, ids[:, m:], Stored(stored.kv, {}, states), speedup)[0]


def _hits(model: Net, rows: list[Sample], speedup: float | None) -> dict[str, Tensor]:
    ids = torch.from_numpy(np.stack([row.ids for row in rows]))
    m = rows[0].boundary
    answer = torch.from_numpy(np.stack([row.answer for row in rows]))[:, m:]
    found = {}
    for name, out in _columns(model, ids, m, speedup):
        guess = model.lm_head(out[:, :-1]).argmax(-1)
        found[name] = (guess == ids[:, m + 1 :])[answer[:, 1:]]
    return found
