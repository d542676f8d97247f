"""Trains a miniature hybrid on public-domain text and recall tasks; resumes where it stopped.

    python -P benchmarks/train_mini.py retrieval --tokens 30000000

Snapshots and the log go to `~/.cache/tailreplay/mini/<name>` (`--home` moves them); `--export`
writes bf16 weights to where they are committed, `--score 2048` scores those, `--paths 256` says
whether their answers come through states or through KV. One line is printed at each evaluation.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import Optimizer

sys.path.append(str(Path(__file__).parent))

from mini import forward, model, paths, score
from mini.forward import Net
from mini.recipes import RECIPES, Level, Recipe
from mini.tasks import TASKS, Corpus, Load, Sample
from mini.tokenizer import Tokenizer

Rows = tuple[str, list[Sample]]


class Trainer:
    """One training run; all its state is in `snapshot`."""

    def __init__(
        self, recipe: Recipe, corpus: Corpus, vocab_size: int, args: argparse.Namespace
    ) -> None:
        self.recipe, self.corpus, self.args = recipe, corpus, args
        shape = model.shape(vocab_size, recipe.family, **recipe.shape)
        self.model = model.new_model(shape, args.seed, recipe.copier)
        self.optimizers = _optimizers(self.model)
        self.rng = np.random.default_rng(args.seed)
        self.progress = {"tokens": 0, "step": 0, "level": 0, "right": 0.0, "loss": 0.0}

    @property
    def level(self) -> Level:
        """Where in the curriculum training is."""
        return self.recipe.levels[int(self.progress["level"])]

    def step(self) -> None:
        """One batch, one update, and a look at whether the next level is due."""
        level, progress = self.level, self.progress
        if self.rng.random() < level.drill:
            level = level.drilled(int(self.rng.choice((32, 64, 128))), int(self.rng.integers(1, 3)))
        cut = self.rng.random() < level.cut
        names, rows = _batch(self.corpus, self.rng, level, cut)
        loss, right = self._loss(names, rows, rows[0].boundary if cut else None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.recipe.rate * level.ease * self._schedule()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress["tokens"] += len(rows) * level.length
        progress["step"] += 1
        progress["loss"] += 0.05 * (loss.item() - progress["loss"])
        if right is not None:
            progress["right"] += 0.05 * (right - progress["right"])
        self._climb()

    def snapshot(self, path: Path) -> None:
        """Writes everything needed to go on as if never stopped, atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.bit_generator.state,
            "progress": self.progress,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        """Takes up the run that `snapshot` wrote to `path`."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = state["rng"]
        self.progress = state["progress"]

    def start_from(self, path: Path) -> None:
        """Takes the weights of another run's snapshot, but for FA where that is to start anew."""
        self.model.load_state_dict(torch.load(path, weights_only=True)["model"])
        if self.recipe.anew:
            model.forget_attention(self.model)

    def report(self) -> str:
        """One line: where we are, the loss on held-back text, and full/zero/tail of each task."""
        level, progress = self.level, self.progress
        loss = score.text_loss(self.model, self.corpus, min(512, level.length), level.speedup)
        line = (
            f"tokens {progress['tokens'] / 1e6:.2f}M level {progress['level']} ({level.length},"
            f" x{level.speedup}) train {progress['loss']:.2f}/{progress['right']:.2f}"
            f" text {loss:.3f}"
        )
        for name, task, packed in (
            ("packed", "needles", True),
            ("needles", "needles", False),
            ("track", "track", False),
            ("common", "common", False),
        ):
            load = level.load(packed)
            if packed:
                load = Load(level.length, 0, 8, packed=True, alphabet=level.alphabet)
            samples = max(4, min(32, 8192 // level.length))
            found = score.recall(self.model, self.corpus, task, load, samples, level.speedup)
            line += f" | {name} " + "/".join(f"{value:.2f}" for value in found.values())
        return line

    def export(self, path: Path) -> None:
        """Writes the weights, with the present speed-up of the decays made part of them."""
        speedup = self.level.speedup or 1.0
        gates = [b.linear_attn.A_log for b in self.model.model.layers if hasattr(b, "linear_attn")]
        with torch.no_grad():
            for gate in gates:
                gate += math.log(speedup)
            model.save(self.model, path)
            for gate in gates:
                gate -= math.log(speedup)

    def _loss(
        self, names: list[str], rows: list[Sample], cut: int | None
    ) -> tuple[Tensor, float | None]:
        """Loss on text, by its share, plus mean loss of each task; share of needles found."""
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        answer = torch.from_numpy(np.stack([row.answer for row in rows]))[:, 1:]
        judged = answer | torch.from_numpy(np.stack([row.text for row in rows]))[:, 1:]
        memory = forward.Memory(cut, self.level.speedup, self.level.attends)
        logits = self.model.lm_head(forward.hidden_states(self.model, ids, memory)[:, :-1][judged])
        targets = ids[:, 1:][judged]
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = losses[~answer[judged]].sum() / ids.numel()
        tasks = sorted(set(names) - {"text"})
        right = None
        for task in tasks:
            asked = torch.tensor([name == task for name in names])[:, None] & answer
            loss = loss + losses[asked[judged]].mean() / len(tasks)
            if task == "needles":
                right = (logits.argmax(-1) == targets)[asked[judged]].float().mean().item()
        return loss, right

    def _schedule(self) -> float:
        """Factor on the learning rate: a short rise, constant, linear fall in the last fifth."""
        left = 1 - self.progress["tokens"] / self.args.tokens
        return min(1.0, (self.progress["step"] + 1) / 50, max(0.05, left / 0.2))

    def _climb(self) -> None:
        progress, level = self.progress, self.level
        if progress["right"] >= level.pass_at and progress["level"] + 1 < len(self.recipe.levels):
            progress.update(level=progress["level"] + 1, right=progress["right"] - 0.1)


def main() -> None:
    """Reads the command line and trains until `--tokens`."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.load()
    corpus = Corpus(tokenizer, tuple(args.text)) if args.text else Corpus(tokenizer)
    name = args.name or args.recipe
    if args.score or args.paths:
        for line in _figures(model.load(name), corpus, args):
            print(line, flush=True)
        return
    home = args.home / name
    trainer = _trainer(args, corpus, len(tokenizer), home)
    if args.export:
        trainer.export(model.home(name) / f"{name}.safetensors")
        return
    _train(trainer, home)


def _figures(net: Net, corpus: Corpus, args: argparse.Namespace) -> Iterator[str]:
    if args.score:
        yield from (*score.table(net, corpus, args.score), "", *score.lives(net))
    if args.paths:
        yield from paths.table(net, corpus, args.paths)


def _trainer(args: argparse.Namespace, corpus: Corpus, vocab_size: int, home: Path) -> Trainer:
    trainer = Trainer(RECIPES[args.recipe], corpus, vocab_size, args)
    home.mkdir(parents=True, exist_ok=True)
    if (home / "last.pt").exists():
        trainer.resume(home / "last.pt")
    elif trainer.recipe.base:
        trainer.start_from(args.base or args.home / trainer.recipe.base / "last.pt")
    return trainer


def _train(trainer: Trainer, home: Path) -> None:
    started = saved = last = time.monotonic()
    begun = trainer.progress["tokens"]
    while trainer.progress["tokens"] < trainer.args.tokens:
        trainer.step()
        done = trainer.progress["tokens"] >= trainer.args.tokens
        if done or time.monotonic() - saved > 60:
            trainer.snapshot(home / "last.pt")
            saved = time.monotonic()
        if done or time.monotonic() - last > trainer.args.every:
            rate = (trainer.progress["tokens"] - begun) / (time.monotonic() - started)
            line = f"{trainer.report()} | {rate:.0f} tokens/s"
            print(line, flush=True)
            with (home / "log.txt").open("a") as log:
                log.write(line + "\n")
            last = time.monotonic()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--name", help="folder of the run, default the recipe's name")
    parser.add_argument("--tokens", type=int, default=30_000_000, help="when to stop")
    parser.add_argument("--every", type=float, default=60, help="seconds between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, nargs="*", help="texts instead of the shipped ones")
    parser.add_argument("--home", type=Path, default=Path("~/.cache/tailreplay/mini").expanduser())
    parser.add_argument(
        "--base", type=Path, help="snapshot to start from, where a recipe needs one"
    )
    parser.add_argument("--export", action="store_true", help="write weights of the last snapshot")
    parser.add_argument("--score", type=int, metavar="TOKENS", help="score the committed weights")
    parser.add_argument(
        "--paths", type=int, nargs="+", metavar="TOKENS", help="cut states or KV at the boundary"
    )
    return parser.parse_args()


def _optimizers(net: Net) -> list[Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else."""
    inner = {n: p for n, p in net.named_parameters() if p.ndim == 2 and ".layers." in n}
    small = [p for n, p in inner.items() if min(p.shape) < 16]
    matrices = [p for p in inner.values() if min(p.shape) >= 16]
    rest = [p for n, p in net.named_parameters() if n not in inner]
    return [
        torch.optim.Muon(
            [{"params": matrices, "share": 1.0}], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": rest + small, "share": 0.4}], betas=(0.9, 0.98), weight_decay=0.01
        ),
    ]


def _batch(
    corpus: Corpus, rng: np.random.Generator, level: Level, cut: bool
) -> tuple[list[str], list[Sample]]:
    """Task names and samples of one step; with `cut` all are needles of one boundary."""
    count = level.batch_tokens // level.length
    packed = rng.random() < level.packed
    if cut:
        names = ["needles"] * count
    else:
        names = list(rng.choice(list(level.mix), count, p=list(level.mix.values())))
    return names, [_sample(corpus, rng, level, name, packed) for name in names]


def _sample(
    corpus: Corpus, rng: np.random.Generator, level: Level, name: str, packed: bool
) -> Sample:
    return TASKS[name](corpus, rng, level.load(packed and name == "needles"))


if __name__ == "__main__":
    main()
