"""What saves cost a NeMo training, and what a restore takes: ``python -m benchmarks.nemo``, after ``make nemo-setup``.

The same small model trains on the CPU with each of the ways to save, in a process of its own that runs NeMo; see
``benchmarks/README.md`` for what each column means. Compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._machine import folder_on_disk

__all__ = ["CONTENDERS", "Figures", "figures_of", "main"]

_ROOT = Path(__file__).parents[1]
_PYTHON = _ROOT / ".venv-nemo" / "bin" / "python"
_JOB = _ROOT / "tests" / "nemo" / "nemo_job.py"
#: Steps between two saves; the first half of them counts as with a save, the second as without.
EVERY = 10
_NEVER = 1 << 30
_DEADLINE_S = 900.0

#: Name -> options of the job.
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    "no saves": {"every": _NEVER},
    "ours, lazy": {},
    "ours, eager": {"lazy_bytes": sys.maxsize},
    "NeMo, asynchronous": {"ours": False},
    "NeMo, synchronous": {"ours": False, "asynchronous": False},
    "NVRx local, asynchronous": {"ours": False, "nvrx": True},
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds of one contender.

    Attributes:
        step_s: median step without a save.
        thread_s: on the training thread, for each save but the last.
        lost_s: of training, for each save: half of the steps between saves, with one and without.
        restore_s: of a resume; None: there is no checkpoint.
    """

    step_s: float
    thread_s: float
    lost_s: float
    restore_s: float | None


def figures_of(trained: Sequence[Mapping[str, Any]], resumed: Sequence[Mapping[str, Any]]) -> Figures:
    """Figures from what two runs of the job told: one from the start, and one that resumed its last checkpoint.

    The steps before the first save are not counted: in them everything is done for the first time.
    """
    at = {line["step"]: line["at"] for line in trained if "step" in line}
    took = {step: at[step] - at[step - 1] for step in at if step - 1 in at}
    half = EVERY // 2
    starts = [step for step in range(EVERY, max(at) - EVERY + 1, EVERY)]
    without = [took[start + offset] for start in starts for offset in range(half + 1, EVERY + 1)]
    losses = [
        sum(took[start + offset] for offset in range(1, half + 1))
        - sum(took[start + offset] for offset in range(half + 1, EVERY + 1))
        for start in starts
    ]
    saving_s = next(line["saving_s"] for line in trained if "saving_s" in line)
    restores = [line["restoring_s"] for line in resumed if "restoring_s" in line]
    return Figures(
        step_s=statistics.median(without),
        thread_s=saving_s / (max(at) // EVERY - 1),
        lost_s=statistics.median(losses),
        restore_s=restores[0] if restores else None,
    )


def _run(folder: Path, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the job tells. Blocks: until it ends, at most 15 minutes."""
    given = json.dumps({"out": str(folder), "every": EVERY, "save_last": "link", **options})
    environment = {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [str(_PYTHON), "-W", "ignore", str(_JOB), given],
        cwd=_ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
    )
    if done.returncode:
        raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("NEMO ")]


def _table(found: Mapping[str, Figures]) -> Table:
    table = Table(title="NeMo's GPT on the CPU, seconds")
    for column in ("", "step", "on the training thread", "lost per save", "in steps", "restore"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        restore = "-" if one.restore_s is None else f"{one.restore_s:.3f}"
        numbers = (one.step_s, one.thread_s, one.lost_s, one.lost_s / one.step_s)
        table.add_row(name, *(f"{number:.3f}" for number in numbers), restore)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nemo", description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024, help="size of the model; 1024: 17 million parameters")
    parser.add_argument("--saves", type=int, default=6, help="of each contender")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="contenders to run; default: all")
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints; default: on a disk")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    if not _PYTHON.exists():
        parser.error(f"{_PYTHON} does not exist; make nemo-setup installs NeMo there")
    steps = EVERY * (args.saves + 1)
    found = {}
    for name in args.only or CONTENDERS:
        options = {**CONTENDERS[name], "hidden": args.hidden}
        with tempfile.TemporaryDirectory(dir=args.dir or folder_on_disk(), prefix="nemo-bench-") as folder:
            trained = _run(Path(folder), {**options, "steps": steps})
            resumed = [] if name == "no saves" else _run(Path(folder), {**options, "steps": steps + 1})
            found[name] = figures_of(trained, resumed)
    Console().print(_table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))


if __name__ == "__main__":
    main()
