"""Prints checkpoint frequency against goodput, stock Lightning against this library.

``python -m recipes.benchmark.compare --model 36M --steps 40 --intervals 1 5 20`` takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started by its path: its own folder is not where `recipes` is found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.benchmark.figures import best_of, rows_of, table_of
from recipes.benchmark.measure import WRITERS, measure
from recipes.pretrain.data import load_tokenizer, make_loaders
from recipes.pretrain.models import CONFIGURATIONS, parameters_of

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="36M", choices=sorted(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each training")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 5, 20], help="steps between saves")
    parser.add_argument("--writers", nargs="+", default=sorted(WRITERS), choices=sorted(WRITERS))
    parser.add_argument("--rounds", type=int, default=2, help="of all trainings; the fastest of each counts")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--mtbf", type=float, default=3600.0, help="seconds between failures, for the last column")
    parser.add_argument("--restart", type=float, default=30.0, help="seconds from a failure to the next step")
    parser.add_argument("--dir", help="folder on the disk to measure; default: the temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table and returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if (
        min(*args.intervals, args.steps, args.batch, args.rounds) < 1
        or args.warm_up < 0
        or args.mtbf <= 0
        or args.restart < 0
    ):
        parser.error(
            "--intervals, --steps, --batch, --rounds and --mtbf are 1 or more, --warm-up and --restart 0 or more"
        )
    late = [interval for interval in args.intervals if interval > args.steps]
    if late:
        parser.error(
            f"--intervals {late[0]} is more than --steps {args.steps}: nothing would be saved in the time measured"
        )
    if args.dir is not None and not os.path.isdir(args.dir):
        parser.error(f"--dir {args.dir} is no folder; make it, or name one on the disk to measure")
    with _quiet():
        return _compare(args)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block nothing is printed but the table and errors."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "resiliency")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compare(args: argparse.Namespace) -> int:
    model = CONFIGURATIONS[args.model]
    data, _ = make_loaders(load_tokenizer(None), folder=None, length=model.length, batch=args.batch, val_windows=1)
    measured = []
    # Each round has all trainings, so that a machine that is busy for a while does not make one writer look worse.
    plan = [("none", 0), *((writer, interval) for interval in args.intervals for writer in args.writers)] * args.rounds
    for number, (writer, interval) in enumerate(plan, 1):
        print(f"{number} of {len(plan)}: {writer}, a save every {interval} steps", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="resiliency-benchmark-") as folder:
            measured.append(
                measure(writer, interval, model=model, data=data, steps=args.steps, warm_up=args.warm_up, folder=folder)
            )
    rows = rows_of(best_of(measured), mtbf_s=args.mtbf, restart_s=args.restart)
    if args.json:
        facts = {"model": args.model, "parameters": parameters_of(model), "steps": args.steps, "batch": args.batch}
        more = {"mtbf_s": args.mtbf, "restart_s": args.restart, "rows": [dataclasses.asdict(row) for row in rows]}
        print(json.dumps({**facts, **more}, indent=2))
    else:
        print(f"{args.model}, {parameters_of(model) / 1e6:.1f} million parameters\n")
        print(table_of(rows, mtbf_s=args.mtbf, restart_s=args.restart))
    return 0


if __name__ == "__main__":
    sys.exit(main())
