"""The second half of the demo: kills hosts, brings one back, and prints each thing that follows as it happens."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.quickstart.hosts import Hosts
from recipes.quickstart.story import Chapter, Deed, DeedKind, Teller, chapters_of
from resiliency.events import boot_seconds

__all__ = ["narrate", "story_table"]

POLL_S = 0.02
#: Seconds between two requests to the supervisor.
ASK_S = 0.5


class Watch:
    """The screen: a progress line, and the lines above it that stay. Thread: one."""

    def __init__(self, console: Console, progress: Progress, hosts: Hosts) -> None:
        self._console, self._progress, self._hosts = console, progress, hosts
        self._task = progress.add_task("hosts")
        self._teller = Teller()
        self._began_s = boot_seconds()
        self._pause = threading.Event()

    def say(self, text: str, at_s: float | None = None) -> None:
        after_s = (boot_seconds() if at_s is None else at_s) - self._began_s
        self._console.print(f"[dim]{after_s:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    def begin(self, deed: Deed, text: str) -> None:
        self._teller.begin(deed)
        self.say(text, deed.time_s)

    def until(self, is_so: Callable[[], bool], waits_for: str) -> None:
        """Prints the news of the job until ``is_so`` returns True.

        Raises:
            SystemExit: the job ended before that, or passed its deadline.
        """
        follower = self._hosts.follower
        while True:
            for at_s, text in self._teller.tell(follower.poll()):
                self.say(text, at_s)
            if is_so():
                return
            if not self._hosts.launch.running():
                self._hosts.launch.check()
                raise SystemExit(f"the job has ended, and this was still to come: {waits_for}")
            at = f"step {follower.step}, {len(follower.workers)} hosts" if follower.moved else "no rank trains"
            self._progress.update(self._task, description=f"{at}; {waits_for}")
            self._pause.wait(POLL_S)


def narrate(args: argparse.Namespace, console: Console) -> list[Chapter]:
    """Runs the job to its end; returns a chapter for each thing that was done to a host. Blocks: minutes.

    Raises:
        SystemExit: the job failed, or passed its deadline.
    """
    folder = (args.dir / "hosts").resolve()
    console.rule("[bold]hosts are killed", align="left")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, Hosts(folder, args) as hosts:
        watch = Watch(console, progress, hosts)
        watch.say(
            f"{args.hosts} hosts and a spare are started on this machine, each with a launcher that imports torch"
        )
        _wait_for_start(watch, hosts)
        _train(watch, hosts, args.between)
        deed = hosts.kill(hosts.follower.hosts[1])
        watch.begin(deed, f"[red]{deed.host} is killed[/red], with all of its processes; a spare is there")
        _wait_for_training(watch, hosts, deed, "the spare is to take its place")
        _train(watch, hosts, args.between)
        deed = hosts.kill(hosts.follower.hosts[0])
        watch.begin(deed, f"[red]{deed.host} is killed[/red], where rank 0 ran; there is no spare any more")
        _wait_for_training(watch, hosts, deed, "the others are to go on without it")
        _train(watch, hosts, args.between)
        deed = hosts.bring_back()
        watch.begin(deed, f"[green]{deed.host} comes back[/green]: its monitor is started; training goes on meanwhile")
        _wait_for_training(watch, hosts, deed, "it is to be taken in at a checkpoint")
        _train(watch, hosts, args.between)
        hosts.end()
        watch.say("the demo has seen enough, and ends the job")
        watch.until(lambda: not hosts.launch.running(), "the training ends")
        hosts.launch.check()
        hosts.follower.poll()
        return chapters_of(hosts.deeds, hosts.follower.records)


def _wait_for_start(watch: Watch, hosts: Hosts) -> None:
    """Waits until all hosts train and the spare has passed its check."""
    ready: set[str] = set()
    asked_s = 0.0

    def is_so() -> bool:
        nonlocal asked_s
        if time.monotonic() - asked_s >= ASK_S:
            asked_s = time.monotonic()
            for host in sorted(hosts.ready() - ready):
                watch.say(f"{host} has started, and passes its check")
                ready.add(host)
        return hosts.is_full() and len(ready) > hosts.full

    watch.until(is_so, "hosts start, are checked, and take their places")


def _train(watch: Watch, hosts: Hosts, steps: int) -> None:
    watch.until(lambda: hosts.follower.made >= steps, f"the next thing happens after {steps} steps")


def _wait_for_training(watch: Watch, hosts: Hosts, deed: Deed, waits_for: str) -> None:
    follower = hosts.follower
    expected = hosts.full - (deed.kind is DeedKind.KILL and sum(one.kind is DeedKind.KILL for one in hosts.deeds) > 1)
    watch.until(
        lambda: follower.attempt > deed.attempt and follower.moved and len(follower.workers) == expected, waits_for
    )


def story_table(chapters: list[Chapter], folder: Path, began_s: float) -> Table:
    """A table of all chapters. ``folder``: of the run. ``began_s``: its start, by the clock of the event log."""
    table = Table(title=f"What happened to the hosts ({folder.name})", title_justify="left")
    table.add_column("")
    resizes = _resizes(folder)
    for chapter in chapters:
        table.add_column(f"{chapter.deed.host} {chapter.deed.kind.value}", justify="right")

    def row(name: str, of: Callable[[Chapter], str]) -> None:
        table.add_row(name, *map(of, chapters))

    row("seconds from the start", lambda one: f"{one.deed.time_s - began_s:.1f}")
    row("after step", lambda one: str(one.deed.step))
    row("noticed after", lambda one: _seconds(one.noticed_s))
    row("what was done", lambda one: one.done)
    row("decided after", lambda one: _seconds(one.decided_s))
    row("first step after", lambda one: _seconds(one.trains_s))
    row("from the save of step", lambda one: "-" if one.from_step is None else str(one.from_step))
    row("steps made meanwhile", lambda one: str(one.meanwhile))
    row("steps made again", lambda one: str(one.redone))
    row("ranks", lambda one: f"{one.deed.ranks} -> {one.ranks}")
    row("samples a step", lambda one: _resized(one, resizes, "samples", "{}"))
    row("learning rate, times", lambda one: _resized(one, resizes, "lr_factor", "{:.2f}"))
    return table


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _resized(chapter: Chapter, resizes: list[dict[str, Any]], name: str, form: str) -> str:
    for one in resizes:
        if (one["old"], one["new"]) == (chapter.deed.ranks, chapter.ranks):
            return form.format(one[name])
    return "as before"


def _resizes(folder: Path) -> list[dict[str, Any]]:
    """What train.py wrote each time that it came back with another number of ranks."""
    path = folder / "resizes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
