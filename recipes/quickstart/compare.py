"""The first half of the demo: the same training twice, undisturbed and while its processes are killed."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.quickstart.chaos import Killer, Shot, Victim, draw_kills
from recipes.quickstart.figures import Figures, figures_of
from recipes.quickstart.follow import Record
from recipes.quickstart.launch import Launch

__all__ = ["compare"]

POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: what train.py wrote, how long it took, its event records and the kills."""

    result: dict[str, Any]
    wall_s: float
    records: list[Record]
    shots: list[Shot]

    def figures(self) -> Figures:
        return figures_of(self.records, self.shots)


def train(args: argparse.Namespace, name: str, *, kills: int, advance: Callable[[int, list[Shot]], None]) -> Outcome:
    """Runs the training to its end. ``advance`` is called with the step and the kills so far."""
    arguments = ["--ranks", str(args.ranks), "--steps", str(args.steps), "--every", str(args.every)]
    if args.data:
        arguments += ["--data", str(Path(args.data).resolve())]
    folder = (args.dir / name).resolve()
    # A few restarts more than kills: a restart can itself fail, for example when another program takes its port.
    restarts = kills + 4 if kills else 0
    flags = ["--standalone", f"--nproc-per-node={args.ranks}", f"--max-restarts={restarts}"]
    flags += ["--crash-loop=0"]  # it is killed every few seconds
    with Launch(folder, flags, arguments, deadline_s=args.deadline) as launch:
        planned = draw_kills(seed=args.seed, count=kills, steps=args.steps, ranks=args.ranks)
        killer = Killer(planned, launch.follower, ranks=args.ranks)
        pause = threading.Event()
        while launch.running():
            killer.consider(launch.follower.poll())
            advance(launch.follower.step, killer.shots)
            pause.wait(POLL_S)
        wall_s = time.monotonic() - launch.started_s
        launch.check()
        launch.follower.poll()
        result = json.loads((folder / "result.json").read_text())
        return Outcome(result=result, wall_s=wall_s, records=launch.follower.records, shots=killer.shots)


def watch(args: argparse.Namespace, console: Console, name: str, title: str, *, kills: int) -> Outcome:
    """Runs ``train`` with a progress bar; each kill is printed as a line above it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    shown = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=args.steps)

        def advance(step: int, shots: list[Shot]) -> None:
            nonlocal shown
            progress.update(task, completed=step)
            for shot in shots[shown:]:
                where = "in a save" if shot.kill.in_save else "between saves"
                console.print(f"  [red]SIGKILL[/red] to {shot.kill.victim.value} after step {shot.step}, {where}")
            shown = len(shots)

        outcome = train(args, name, kills=kills, advance=advance)
        progress.update(task, completed=outcome.result["step"])
    return outcome


def table_of(calm: Outcome, killed: Outcome) -> Table:
    """The comparison that the demo prints."""
    table = Table(title="Same training, undisturbed and killed", title_justify="left")
    for column in ("", "undisturbed", "killed"):
        table.add_column(column, justify="left" if not column else "right")
    left, right = calm.figures(), killed.figures()
    agents = sum(shot.kill.victim is Victim.AGENT for shot in killed.shots)
    redone = [recovery.redone for recovery in right.recoveries]
    seconds = [recovery.duration_s for recovery in right.recoveries]

    def row(name: str, of: Callable[[Outcome, Figures], str]) -> None:
        table.add_row(name, of(calm, left), of(killed, right))

    row("steps", lambda outcome, _: str(outcome.result["step"]))
    row("seconds", lambda outcome, _: f"{outcome.wall_s:.1f}")
    table.add_row("kills: of ranks, of the host agent", "-", f"{len(killed.shots) - agents}, {agents}")
    table.add_row("kills in the middle of a save", "-", str(right.in_save))
    row("checkpoints committed", lambda _, figures: str(figures.saves))
    row("bytes per checkpoint", lambda _, figures: f"{figures.save_bytes / 1e6:.1f} MB")
    row("stall per save, median", lambda _, figures: f"{figures.median_stall_s * 1e3:.1f} ms")
    row("stall, share of step time", lambda _, figures: f"{figures.stall_share:.2%}")
    if redone:
        table.add_row("steps redone per kill, median (max)", "-", f"{median(redone):g} ({max(redone)})")
        table.add_row("seconds to recover, median (max)", "-", f"{median(seconds):.1f} ({max(seconds):.1f})")
        table.add_row("restores, all bytes verified", "-", f"{right.restores} ({right.restored_bytes / 1e6:.1f} MB)")
    row("last loss", lambda outcome, _: f"{outcome.result['loss']:.4f}")
    row("SHA-256 of final weights", lambda outcome, _: outcome.result["hash"][:16])
    return table


def compare(args: argparse.Namespace, console: Console) -> bool:
    """Does both runs and prints their table. Returns False when the final weights differ or a kill was not sent."""
    console.rule("[bold]processes are killed", align="left")
    calm = watch(args, console, "undisturbed", "undisturbed", kills=0)
    killed = watch(args, console, "killed", "with kills ", kills=args.kills)
    console.print(table_of(calm, killed))
    same = calm.result["hash"] == killed.result["hash"]
    missed = args.kills - len(killed.shots)
    if same:
        console.print("[green]The weights are equal to the last bit.[/green]")
    else:
        console.print("[red]The weights differ: this is a bug, please report it with the folder[/red]", args.dir)
    if missed:
        console.print(
            f"[yellow]{missed} kills were not sent before the run ended; give --steps a larger number[/yellow]"
        )
    return same and not missed
