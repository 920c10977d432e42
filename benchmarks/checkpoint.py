"""Checkpointing side by side: the library, its peers and the raw floor of the machine, in one run.

    python -m benchmarks.checkpoint            # half an hour on two cores
    python -m benchmarks.checkpoint --quick    # small sizes, to see that everything works
    python -m benchmarks.checkpoint --full     # every size, more rounds

Each contender runs in a process of its own; a peer that is not installed is listed with the reason.
See ``benchmarks/README.md`` for what each column means.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks._contenders import FLOOR_COPY, ISOLATED, LOOP, RESTORE_BASE, Entry
from benchmarks._machine import cores, filesystem, folder_on_disk, machine_facts
from benchmarks._process import run_contender
from benchmarks._report import isolated_table, loop_table, reasons, target_table
from benchmarks._summary import summarize_isolated, summarize_loop
from benchmarks._targets import Target, isolated_targets, loop_targets

__all__ = ["Settings", "main"]

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a state in MiB, and its number of tensors."""

    mebibytes: int
    tensors: int

    def __str__(self) -> str:
        return f"{self.mebibytes} MiB in {self.tensors} tensors"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run of the benchmark does.

    Attributes:
        sizes: states of the first part, in isolation.
        rounds: passes over all contenders of the first part, so that drift of the machine affects all alike.
        processes: processes per round for each floor, each bound, DCP and this library.
        saves: warm saves per process, without compute.
        overlapped_saves: saves per process, during compute.
        restores: restores per process.
        compute_s: seconds of the simulated forward and backward; at least three times the copy floor is used.
        threads: torch threads in the first part; 0: one per core.
        loop_mebibytes: states of the second part, the training loop, in MiB per rank.
        loop_rounds: runs of each contender in the training loop.
        loop_saves: measured saves per run.
        segment: number of steps that are counted with a save, and of steps after them that are counted without.
        batch: rows per rank and step; with the width of the layers it decides how long a step takes.
        ranks: ranks of the training loop, which share all cores.
        only: names of contenders to run; empty: all.
        deadline: of one contender's run.
    """

    sizes: tuple[Size, ...] = (Size(mebibytes=256, tensors=32), Size(mebibytes=1024, tensors=300))
    rounds: int = 1
    processes: int = 3
    saves: int = 4
    overlapped_saves: int = 3
    restores: int = 3
    compute_s: float = 0.25
    threads: int = 0
    loop_mebibytes: tuple[int, ...] = (256,)
    loop_rounds: int = 1
    loop_saves: int = 16
    segment: int = 5
    batch: int = 96
    ranks: int = 2
    only: tuple[str, ...] = ()
    deadline: timedelta = timedelta(minutes=5)


_QUICK = {
    "sizes": (Size(mebibytes=32, tensors=16),),
    "processes": 1,
    "saves": 2,
    "overlapped_saves": 2,
    "compute_s": 0.05,
    "loop_mebibytes": (24,),
    "loop_saves": 2,
    "segment": 4,
    "batch": 16,
}
_FULL = {
    "sizes": (
        *(Size(mebibytes=size, tensors=count) for size in (256, 1024) for count in (32, 300)),
        Size(mebibytes=1024, tensors=1000),
    ),
    "rounds": 3,
    "loop_mebibytes": (256, 1024),
    "loop_rounds": 2,
    "deadline": timedelta(minutes=15),
}


class Benchmark:
    """Runs the parts and keeps their results. Used by one thread.

    Args:
        settings: what to do.
        folder: where the checkpoints go, on the disk to be measured.
        console: for progress and tables.
    """

    def __init__(self, settings: Settings, folder: Path, console: Console) -> None:
        self._settings, self._folder, self._console = settings, folder, console
        self._facts = machine_facts(folder)
        self._isolated: dict[Size, dict[str, list[dict[str, Any]]]] = {size: {} for size in settings.sizes}
        self._loop: dict[int, dict[str, list[dict[str, Any]]]] = {size: {} for size in settings.loop_mebibytes}

    def _wanted(self, entries: Sequence[Entry]) -> list[Entry]:
        only = self._settings.only
        return [entry for entry in entries if not only or entry.name in only or entry.role == "floor"]

    # -- the two parts --------------------------------------------------------------------------------------------

    def run_isolated(self) -> None:
        """Runs every contender at every size, ``rounds`` times; each round begins with another peer.

        Where the memory of a process lies changes the speed of its copies by up to a factor of two for its whole life.
        So the figures that targets use are measured in several processes per round, one after the other. The floors
        come first, because the length of compute depends on them.
        """
        settings = self._settings
        entries = self._wanted(ISOLATED)
        floors, peers, bounds, own = (
            [entry for entry in entries if entry.role == role] for role in ("floor", "peer", "bound", "ours")
        )
        with self._progress() as progress:
            base = [entry for entry in peers if entry.name == RESTORE_BASE]
            again = [*floors, *base, *bounds, *own] * settings.processes
            peers = [entry for entry in peers if entry not in base]
            task = progress.add_task(
                "in isolation", total=settings.rounds * len(settings.sizes) * len([*floors, *peers, *again])
            )
            for turn in range(settings.rounds):
                first = turn * len(peers) // settings.rounds
                for size in settings.sizes:
                    for entry in [*floors, *peers[first:], *peers[:first], *again]:
                        progress.update(task, description=f"in isolation: {size}, {entry.label}")
                        found = self._isolated[size].setdefault(entry.name, [])
                        where = f"{size}, round {turn + 1}"
                        self._try(entry, found, where, partial(self._one_isolated, entry, size))
                        progress.advance(task)

    def _one_isolated(self, entry: Entry, size: Size) -> dict[str, Any]:
        settings = self._settings
        floor = summarize_isolated(self._isolated[size].get(FLOOR_COPY, [])).get("stall_s") or 0.0
        spec = {
            **_found_at(entry),
            **asdict(size),
            "threads": settings.threads or cores(),
            "saves": settings.saves,
            "overlapped_saves": settings.overlapped_saves,
            "restores": settings.restores,
            "compute_s": max(settings.compute_s, 3 * floor),
        }
        env = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "{mark}",
        }
        return self._run(["benchmarks._isolated"], spec, env)

    def run_loop(self) -> None:
        """Runs every contender in the training loop."""
        settings = self._settings
        entries = self._wanted(LOOP)
        with self._progress() as progress:
            task = progress.add_task(
                "training loop", total=settings.loop_rounds * len(settings.loop_mebibytes) * len(entries)
            )
            for turn in range(settings.loop_rounds):
                for size in settings.loop_mebibytes:
                    for entry in entries:
                        progress.update(task, description=f"training loop: {size} MiB a rank, {entry.label}")
                        found = self._loop[size].setdefault(entry.name, [])
                        where = f"loop, {size} MiB, round {turn + 1}"
                        self._try(entry, found, where, partial(self._one_loop, entry, size))
                        progress.advance(task)

    def _one_loop(self, entry: Entry, mebibytes: int) -> dict[str, Any]:
        settings = self._settings
        threads = max(1, cores() // settings.ranks)
        spec = {
            **_found_at(entry),
            "strategy": entry.strategy,
            "mebibytes": mebibytes,
            "width": _width(mebibytes),
            "batch": settings.batch,
            "segment": settings.segment,
            "saves": settings.loop_saves,
            "ranks": settings.ranks,
            "threads": threads,
        }
        launcher = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(settings.ranks),
            "-m",
            "benchmarks._loop",
        ]
        return self._run(launcher, spec, {"OMP_NUM_THREADS": str(threads)})

    def _run(self, module: Sequence[str], spec: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
        os.sync()  # writes that the previous contender left pending must not slow this one
        return run_contender(module, spec, folder=self._folder, deadline=self._settings.deadline, env=env)

    def _try(self, entry: Entry, found: list[dict[str, Any]], where: str, once: Callable[[], dict[str, Any]]) -> None:
        """Runs a contender. A failure is printed and kept, and the run repeated once, because a peer may start too
        slowly."""
        for _ in range(2):
            if any("unavailable" in one for one in found):
                return
            start = time.monotonic()
            found.append(once())
            if "error" not in found[-1]:
                if not self._console.is_terminal:  # where no progress bar can be shown
                    self._console.print(f"{where}: {entry.label}, {time.monotonic() - start:.0f} s", style="dim")
                break
            self._console.print(f"[yellow]{entry.label} ({where}): {escape(found[-1]['error'])}")
        if "unavailable" in found[-1]:
            self._console.print(f"[yellow]{entry.label}: {escape(found[-1]['unavailable'])}")

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)

    # -- results --------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[str, object, dict[str, dict[str, Any]]]]:
        for size, found in self._isolated.items():
            if found:
                yield "isolated", size, {name: summarize_isolated(rounds) for name, rounds in found.items() if rounds}
        for mebibytes, found in self._loop.items():
            if found:
                segment = self._settings.segment
                yield (
                    "loop",
                    mebibytes,
                    {name: summarize_loop(rounds, segment=segment) for name, rounds in found.items() if rounds},
                )

    def targets(self) -> list[Target]:
        """Every target for which there are rows."""
        targets: list[Target] = []
        for part, size, rows in self._rows():
            if part == "isolated":
                targets += isolated_targets(rows, where=str(size))
            else:
                for strategy in dict.fromkeys(entry.strategy for entry in LOOP):
                    roles = {entry.name: entry.role for entry in LOOP if entry.strategy == strategy}
                    of_strategy = {name: row for name, row in rows.items() if name in roles}
                    targets += loop_targets(of_strategy, roles, where=f"{strategy}, {size} MiB a rank")
        return targets

    def print(self) -> None:
        """Prints machine, tables, reasons and targets."""
        out, settings = self._console, self._settings
        facts = {key: value for key, value in self._facts.items() if key != "versions"}
        out.print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))
        out.print(", ".join(f"{name} {version}" for name, version in self._facts["versions"].items()))
        missing: dict[str, None] = {}
        for part, size, rows in self._rows():
            entries = ISOLATED if part == "isolated" else LOOP
            out.print()
            if part == "isolated":
                out.print(isolated_table(f"In isolation: {size}; seconds, medians of warm saves", entries, rows))
            else:
                every = 2 * settings.segment
                loop = (
                    f"{settings.ranks} gloo ranks, DDP or FSDP2, {size} MiB of state a rank, a save every {every} steps"
                )
                out.print(loop_table(f"Training loop: {loop}; seconds", entries, rows))
            missing.update(dict.fromkeys(reasons(entries, rows)))
        for line in missing:
            out.print(escape(line), style="yellow", soft_wrap=True)
        targets = self.targets()
        if targets:
            out.print()
            out.print(target_table(targets))

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file: settings, rows, targets and raw samples."""
        labels = {"isolated": {e.name: e for e in ISOLATED}, "loop": {e.name: e for e in LOOP}}
        tables = []
        for part, size, rows in self._rows():
            described = asdict(size) if isinstance(size, Size) else {"mebibytes": size}
            raw = self._isolated[size] if isinstance(size, Size) else self._loop[size]  # type: ignore[index]
            for name, row in rows.items():
                entry = labels[part][name]
                who = {"part": part, "contender": name, "label": entry.label, "role": entry.role}
                tables.append({**who, **described, **row, "rounds": raw[name]})
        settings = {**asdict(self._settings), "deadline": self._settings.deadline.total_seconds()}
        return {
            "schema_version": _SCHEMA,
            "machine": self._facts,
            "settings": settings,
            "rows": tables,
            "targets": [target.as_dict() for target in self.targets()],
        }


def _found_at(entry: Entry) -> dict[str, str]:
    return {"module": entry.module, "attribute": entry.attribute}


def _width(mebibytes: int) -> int:
    """Width of the layers, a multiple of 64, with which a state of this size has about twenty layers."""
    return max(64, 64 * round(math.sqrt(mebibytes * 2**20 / (12 * 20)) / 64))


def _size(text: str) -> Size:
    mebibytes, _, tensors = text.partition("x")
    return Size(mebibytes=int(mebibytes), tensors=int(tensors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = sorted({entry.name for entry in (*ISOLATED, *LOOP)})
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument(
        "--quick", action="store_true", help="small sizes: shows that everything works, the figures are not meaningful"
    )
    scale.add_argument("--full", action="store_true", help="every size, three rounds, also 1 GiB in the training loop")
    parser.add_argument("--part", choices=("isolated", "loop", "all"), default="all")
    only = f"these contenders and the floors; of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=(), help=only)
    parser.add_argument(
        "--dir", type=Path, help="folder on the disk to be measured; default: the temporary one, if on a disk"
    )
    parser.add_argument("--json", type=Path, help="write everything, raw samples too, to this file")
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="MiBxTENSORS", help="states in isolation, as 256x32 1024x300"
    )
    parser.add_argument("--rounds", type=int, help="rounds in isolation")
    parser.add_argument("--saves", type=int, help="warm saves a round in isolation")
    parser.add_argument("--threads", type=int, help="torch threads in isolation; default: all cores")
    parser.add_argument("--loop-sizes", nargs="+", type=int, metavar="MiB", help="state a rank in the training loop")
    parser.add_argument("--loop-rounds", type=int)
    parser.add_argument("--loop-saves", type=int, help="measured saves a run of the training loop")
    parser.add_argument(
        "--segment",
        type=int,
        help="steps counted with a save, and after them without; a save comes every two segments; default: 5",
    )
    parser.add_argument("--ranks", type=int, help="ranks of the training loop; default: 2")
    return parser.parse_args(argv)


def _settings(args: argparse.Namespace) -> Settings:
    given = {
        "sizes": tuple(args.sizes) if args.sizes else None,
        "rounds": args.rounds,
        "saves": args.saves,
        "threads": args.threads,
        "loop_mebibytes": tuple(args.loop_sizes) if args.loop_sizes else None,
        "loop_rounds": args.loop_rounds,
        "loop_saves": args.loop_saves,
        "segment": args.segment,
        "ranks": args.ranks,
        "only": tuple(args.only),
    }
    settings = replace(Settings(), **(_QUICK if args.quick else _FULL if args.full else {}))  # type: ignore[arg-type]
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when every contender that could be imported ran, 1 otherwise."""
    args = _parse(argv)
    settings = _settings(args)
    console = Console(width=None if Console().is_terminal else 190)
    parent = args.dir or folder_on_disk()
    parent.mkdir(parents=True, exist_ok=True)
    if filesystem(parent) in ("tmpfs", "ramfs"):
        console.print(
            f"[yellow]{parent} is in memory: durable figures are meaningless there; pass a folder on a disk with --dir"
        )
    largest = max([size.mebibytes for size in settings.sizes] + [4 * size for size in settings.loop_mebibytes])
    if shutil.disk_usage(parent).free < 5 * largest * 2**20:
        console.print(
            f"[red]{parent} has too little room, {5 * largest} MiB must be free; pass another --dir or smaller --sizes"
        )
        return 2
    if os.getloadavg()[0] > 0.5 * cores():
        console.print("[yellow]this machine is busy with other work; the ratios will be rough")
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=parent))
    benchmark = Benchmark(settings, folder, console)
    try:
        if args.part != "loop":
            benchmark.run_isolated()
        if args.part != "isolated":
            benchmark.run_loop()
    except KeyboardInterrupt:
        console.print("[yellow]stopped; what was measured so far:")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    benchmark.print()
    found = benchmark.as_dict()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if any(row["status"] == "failed" for row in found["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
