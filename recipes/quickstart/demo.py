"""Trains a small GPT while processes and hosts are killed, and shows what that cost: ``make demo``, or
``python -m recipes.quickstart.demo``. Exits with 1 when something that is promised did not come true."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

if __name__ == "__main__" and not __package__:  # started by its path: its own folder is not where `recipes` is found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.quickstart.compare import compare
from recipes.quickstart.narrate import narrate, story_table
from recipes.quickstart.story import Chapter
from resiliency.events import boot_seconds

__all__ = ["main"]

REMEDIES = ("hot_swap", "scale_down", "scale_up")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.quickstart.demo", description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="folder of the runs; those of an earlier demo are deleted"
    )
    parser.add_argument("--data", help="folder with text files (default: the sources of Python's library)")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds that each run may take")
    parser.add_argument("--only", choices=("processes", "hosts"), help="one half of the demo")
    processes = parser.add_argument_group("processes are killed")
    processes.add_argument("--steps", type=int, default=160)
    processes.add_argument("--ranks", type=int, default=2)
    processes.add_argument("--kills", type=int, default=6)
    processes.add_argument("--seed", type=int, default=0, help="draws which processes are killed and when")
    hosts = parser.add_argument_group("hosts are killed")
    hosts.add_argument("--hosts", type=int, default=3, help="beside one spare; one rank each")
    hosts.add_argument("--between", type=int, default=15, help="steps of training before the next thing happens")
    hosts.add_argument("--heartbeat-timeout", type=float, default=2.0, help="seconds until a silent host is lost")
    hosts.add_argument("--quarantine", type=float, default=3.0, help="seconds that a host that was lost must wait")
    hosts.add_argument("--dwell", type=float, default=3.0, help="seconds that it must have stayed before it is used")
    args = parser.parse_args()
    if args.hosts < 2 or args.between < 1:
        parser.error("pass --hosts 2 or more, and --between 1 or more")
    return args


def main() -> int:
    args = arguments()
    console = Console()
    signal.signal(signal.SIGTERM, _end)
    for name in ("undisturbed", "killed", "hosts"):  # all other contents of the folder stay
        shutil.rmtree(args.dir / name, ignore_errors=True)
    try:
        return run(args, console)
    except KeyboardInterrupt:
        console.print("ended; nothing of it is left running")
        return 128 + signal.SIGINT


def run(args: argparse.Namespace, console: Console) -> int:
    good = args.only == "hosts" or compare(args, console)
    began_s = boot_seconds()
    chapters = [] if args.only == "processes" else narrate(args, console)
    page = args.dir / "goodput.html"
    logs = [args.dir / "killed" / ".resiliency" / "killed" / "events", args.dir / "hosts" / "events"]
    reported = report([log for log in logs if log.is_dir()], page)
    if chapters:
        console.print(story_table(chapters, args.dir / "hosts", began_s))
        good &= told(chapters, console)
    console.print(f"Where every second went: {page}")
    return 0 if good and reported else 1


def told(chapters: list[Chapter], console: Console) -> bool:
    """True when the supervisor has taken the expected remedies, in order, and training went on after each; otherwise
    prints what was done and returns False."""
    remedies = tuple(chapter.remedy for chapter in chapters)
    if remedies == REMEDIES and all(chapter.trains_s is not None for chapter in chapters):
        return True
    console.print(f"[red]What was done is {', '.join(remedies)}, and not {', '.join(REMEDIES)}[/red]")
    return False


def report(logs: list[Path], page: Path) -> bool:
    """Prints the goodput of the runs and writes it as an HTML page. Returns False when that failed."""
    words = [word for log in logs for word in ("--log", str(log))]
    command = [sys.executable, "-m", "resiliency.cli", "goodput", "report", *words, "--html", str(page)]
    return subprocess.run(command, timeout=120, check=False).returncode == 0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
