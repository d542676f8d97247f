"""What reuse does to answers: miniatures, every way of serving a hit, through engine and store.

    python -P benchmarks/quality.py --json
    python -P benchmarks/quality.py --json --quick
    python -P benchmarks/quality.py --model state --samples 50 --minutes 60 --out state.json
    python -P benchmarks/quality.py --shown retrieval.json state.json --out quality.svg

Tables go to standard error, one JSON object to standard output or to --out, plots beside that file.
benchmarks/README.md says what the columns and rows are.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# -P keeps this folder off the path, so that nothing in it shadows an installed package. Its parts
# and the helpers of the tests are found after everything else.
_ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(_ROOT / "benchmarks"), str(_ROOT / "tests")]

LENGTHS = {
    "retrieval": (256, 512, 1024, 2048, 4096),
    "state": (128, 256, 512, 4096),
    "tracking": (128, 256, 512),
    "olmo": (128, 256),
    "retrieval bf16": (512,),
    "state bf16": (256,),
}
"""Lengths in tokens; `retrieval` was trained at up to 2048, `state` and `olmo` at 256,
`tracking` at 512."""

_SAMPLES, _QUICK_SAMPLES = 12, 1
_QUICK_LONGEST = 1024
_BOUNDARIES = 2
_BOUNDARIES_COMMON = 12
"""A list of words has one answer to a prompt, where others have up to sixteen."""

_TASKS = ("needles", "track", "common", "text")
_BF16 = ("full", "zero", "tail 10%", "exact")


def main() -> None:
    """Measures and prints."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    arguments = _arguments()
    report: dict[str, Any] = {"boundaries": _BOUNDARIES, "models": {}}
    if arguments.shown:
        _show_saved(arguments.shown, arguments.out)
        return
    _measure_all(arguments, report)
    _show(report, sys.stderr)
    if arguments.out is None:
        print(json.dumps(report))


def _measure_all(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    names = [name for name in LENGTHS if arguments.model in ("all", name)]
    samples = arguments.samples or (_QUICK_SAMPLES if arguments.quick else _SAMPLES)
    limit_s = 60 * arguments.minutes / len(names)
    for name in names:
        started_s = time.perf_counter()
        most = _QUICK_LONGEST if arguments.quick else max(LENGTHS[name])
        lengths = arguments.lengths or [n for n in LENGTHS[name] if n <= most]
        measured = measure(name, tuple(lengths), samples, arguments.tasks, arguments.columns)
        for rounds, rows in enumerate(measured, 1):
            passed_s = time.perf_counter() - started_s
            report["models"][name] = rows
            _write(report, arguments.out, drawn=arguments.columns is None)
            print(f"{name}: {rounds} contexts a row, {passed_s:.0f} s", file=sys.stderr)
            if passed_s > limit_s:
                break


def measure(
    name: str, lengths: tuple[int, ...], samples: int, tasks: list[str], only: list[str] | None
) -> Iterator[list[dict[str, Any]]]:
    """All rows of one miniature, again after each round of one more context a row.

    Of all columns, or of full and those in `only`.
    """
    import numpy as np
    import torch
    from mini.tasks import Corpus
    from mini.tokenizer import Tokenizer
    from quality_parts.columns import AGAIN, COLUMNS, bench
    from quality_parts.questions import rows, sample
    from quality_parts.scores import Scores, report

    torch.set_num_threads(1)  # of models this small a second one costs more than it gives
    tokenizer = Tokenizer.load()
    corpus = Corpus(tokenizer)
    scores = [Scores(row) for row in rows(lengths) if row.task in tasks]
    columns = (*_BF16, AGAIN) if name.endswith("bf16") else COLUMNS
    if only is not None:
        if unknown := set(only) - set(columns):
            raise SystemExit(f"no columns {sorted(unknown)}, there are {list(columns)}")
        columns = tuple(column for column in columns if column in ("full", *only))
    with bench(name) as served:
        for number in range(samples):
            for one in scores:
                rng = np.random.default_rng([number, one.row.tokens])
                boundaries = _BOUNDARIES_COMMON if one.row.task == "common" else _BOUNDARIES
                context, prompts = sample(corpus, one.row, rng, boundaries)
                one.add(tokenizer, prompts, served.serve(context, prompts, columns))
            yield report(scores)


def _show_saved(files: list[Path], out: Path | None) -> None:
    """Prints the tables of several files; plots of a miniature are of the first that has it."""
    models: dict[str, Any] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        _show(report, sys.stdout)
        models = report["models"] | models
    if out is not None:
        _draw(models, out)


def _show(report: dict[str, Any], stream: TextIO) -> None:
    from quality_parts.tables import tables

    for name, rows in report["models"].items():
        print("\n".join(tables(name, rows)), file=stream)


def _write(report: dict[str, Any], out: Path | None, *, drawn: bool) -> None:
    """The report, and the plots if all of their columns are there."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if drawn:
            _draw(report["models"], out)


def _draw(models: dict[str, Any], out: Path) -> None:
    from quality_parts.plots import plots

    for name, picture in plots(models).items():
        out.with_name(f"{out.stem}_{name}.svg").write_text(picture, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="a few contexts a row, minutes")
    parser.add_argument("--model", choices=(*LENGTHS, "all"), default="all")
    parser.add_argument("--samples", type=int, help="contexts a row")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens, instead of all lengths")
    parser.add_argument("--tasks", nargs="*", choices=_TASKS, default=_TASKS)
    parser.add_argument("--columns", nargs="*", help="ways of serving, beside full")
    parser.add_argument("--minutes", type=float, default=120, help="no further round after these")
    parser.add_argument(
        "--shown", type=Path, nargs="*", help="files of --out, whose tables are printed instead"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON object; plots go beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
