"""How long a tail an error budget asks for, and how well its figures tell the error beforehand.

    python -P benchmarks/error_figures.py
    python -P benchmarks/error_figures.py --block 16 --samples 8

Per block of tokens, linear layer and head two figures are noted in prefill: the sum of the log
decays, and the norm of the state. From them alone the error of a state that is rebuilt from its
last k tokens is predicted, k(eps) is chosen, and held against replays of every length.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.nn.functional as F
from mini import model as minis
from mini.tasks import TASKS, Corpus, Load
from mini.tokenizer import Tokenizer
from torch import Tensor

from tailreplay.connector.hf_model import HybridModel

BUDGETS = (0.5, 0.3, 0.1, 0.03)
LENGTHS = {"retrieval": 1000, "state": 500}
_CONV_ROWS = 3


@dataclass(frozen=True)
class Case:
    """One prefix: predicted and actual relative errors of its states, both `[starts, L, HV]`.

    A start is a block boundary from which a replay begins; the first is token 0, where both are 0.
    """

    predicted: Tensor
    actual: Tensor
    tails: list[int]
    """Tokens from each start to the end of the prefix."""


def case(net: Any, tokens: Tensor, block: int) -> Case:  # noqa: ANN401 - a Transformers model
    """Prefills a prefix, and replays it from every boundary of a block of `block` tokens."""
    view, m = HybridModel(net), len(tokens)
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in view.linear_layers}
    hooks = [
        net.model.layers[layer].linear_attn.in_proj_a.register_forward_hook(
            lambda _m, _a, out, seen=seen: seen.append(out[0])
        )
        for layer, seen in inputs.items()
    ]
    norms, cache = [torch.zeros(len(inputs), view.value_heads)], view.new_cache()
    with view.capture() as hidden:
        for part in tokens.split(block):
            view.forward(part, cache)
            norms.append(_recurrent(view, cache).flatten(2).norm(dim=-1))
    for hook in hooks:
        hook.remove()
    decay = torch.stack([_decay(net, layer, torch.cat(a), block) for layer, a in inputs.items()])
    starts = range(0, m // block * block + 1, block)
    predicted = torch.stack([_predicted(decay, norms, start // block) for start in starts])
    wanted = _recurrent(view, cache)
    rows = {group.source: _rows(group.source, hidden, tokens) for group in view.groups}
    actual = torch.stack([_error(view, rows, wanted, start) for start in starts])
    return Case(_by_group(view, predicted), actual, [m - start for start in starts])


def figures(cases: list[Case], eps: float) -> dict[str, float]:
    """How well tails chosen for a budget keep it.

    Returns:
        met: share of (prefix, layer, head) whose error at the chosen tail is within the budget.
        ratio: median of chosen tail over the shortest that would have met it.
        group_share: chosen tail of a whole model, its mean error over heads within the budget in
            every layer, as a part of the prefix; mean.
        group_error: mean error that this tail really leaves, over layers and heads.
    """
    met, ratio, share, left = [], [], [], []
    for one in cases:
        tails = torch.tensor(one.tails, dtype=torch.float64)
        chosen, shortest = (_last_within(x, eps) for x in (one.predicted, one.actual))
        met.append(one.actual.gather(0, chosen[None])[0] <= eps)
        ratio.append(tails[chosen] / tails[shortest])
        whole = int(_last_within(one.predicted.mean(2), eps).min())
        share.append(one.tails[whole] / one.tails[0])
        left.append(one.actual[whole].mean().item())
    return {
        "met": torch.cat([x.flatten() for x in met]).double().mean().item(),
        "ratio": torch.cat([x.flatten() for x in ratio]).median().item(),
        "group_share": float(np.mean(share)),
        "group_error": float(np.mean(left)),
    }


def main() -> None:
    """Prints a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4, help="prefixes of each kind")
    parser.add_argument("--block", type=int, default=64, help="tokens per pair of figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus, report = Corpus(Tokenizer.load()), {}
    print("| model, prefix | eps | met | tail / shortest | tail / prefix | error left |")
    print("|---|---|---|---|---|---|")
    for name, length in LENGTHS.items():
        net = minis.load(name)
        for kind in ("text", "needles"):
            prefixes = _prefixes(corpus, kind, length, arguments.samples)
            cases = [case(net, ids, arguments.block) for ids in prefixes]
            for eps in BUDGETS:
                found = figures(cases, eps)
                report[f"{name}, {kind}, {eps:g}"] = found
                cells = " | ".join(f"{value:.3f}" for value in found.values())
                print(f"| {name}, {kind} | {eps:g} | {cells} |", flush=True)
    print(json.dumps(report))


def _prefixes(corpus: Corpus, kind: str, length: int, samples: int) -> Iterator[Tensor]:
    rng = np.random.default_rng(11)
    for number in range(samples):
        m = length + 13 * number  # of no block
        if kind == "text":
            yield torch.from_numpy(corpus.passage(rng, m, held_back=True).copy())
        else:
            row = TASKS[kind](corpus, rng, Load(m + 5, m // 32, 1))
            yield torch.from_numpy(row.ids[: row.boundary])


def _decay(net: Any, layer: int, a: Tensor, block: int) -> Tensor:  # noqa: ANN401 - a Transformers model
    """Sums of g over complete blocks, `[blocks, HV]`; the last, partial one is left out.

    Source: as `tailreplay.replay.state_only`.
    """
    module = net.model.layers[layer].linear_attn
    g = -module.A_log.detach().float().exp() * F.softplus(a.float() + module.dt_bias.detach())
    whole = len(g) // block * block
    return g[:whole].unflatten(0, (-1, block)).sum(1)


def _predicted(decay: Tensor, norms: list[Tensor], block: int) -> Tensor:
    """|error| / |state|, `[L, HV]`, when the state before a block is taken as zero.

    Source: |T_i| <= alpha_i for unit keys and beta in [0, 2], so what is dropped shrinks by at
    least the product of alphas; arXiv 2412.06464, equation 10. Norms only at ends of blocks.
    """
    last = norms[decay.shape[1]]
    return decay[:, block:].sum(1).exp() * norms[block] / last


def _by_group(view: HybridModel, predicted: Tensor) -> Tensor:
    """Gives each head at least what the layers before it in its group are expected to be off by.

    Their error is in its inputs, which its own decay says nothing of.
    """
    out, place = predicted.clone(), {layer: i for i, layer in enumerate(view.linear_layers)}
    for group in view.groups:
        before = torch.zeros(len(predicted))
        for layer in group.linear_layers:
            mine = out[:, place[layer]]
            mine.copy_(torch.maximum(mine, before[:, None]))
            before = torch.maximum(before, mine.mean(1))
    return out


def _error(view: HybridModel, rows: dict[int | None, Tensor], wanted: Tensor, start: int) -> Tensor:
    cache = view.new_cache()
    for group in view.groups:
        view.replay_group(group, rows[group.source][max(0, start - _CONV_ROWS) :], cache)
    got = _recurrent(view, cache)
    return (got - wanted).flatten(2).norm(dim=-1) / wanted.flatten(2).norm(dim=-1)


def _recurrent(view: HybridModel, cache: Any) -> Tensor:  # noqa: ANN401 - Transformers' cache
    """`[L, HV, K, V]` in fp32."""
    states = view.states(cache)
    return torch.stack([states[layer].recurrent for layer in view.linear_layers])


def _rows(source: int | None, hidden: Any, tokens: Tensor) -> Tensor:  # noqa: ANN401
    return tokens if source is None else hidden.rows(source)


def _last_within(errors: Tensor, eps: float) -> Tensor:
    """Latest start whose error is within the budget; the first is, but for rounding."""
    ok = errors <= eps
    ok[0] = True
    places = torch.arange(len(ok)).reshape(-1, *[1] * (ok.ndim - 1))
    return torch.where(ok, places, 0).amax(0)


if __name__ == "__main__":
    main()
