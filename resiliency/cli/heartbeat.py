"""``resiliency heartbeat``: shows what this host's ranks are doing, from their heartbeat files, even when they hang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from resiliency.cli._terminal import console, table
from resiliency.paths import absolute_path
from resiliency.runtime.heartbeat_files import RankHeartbeat, read_heartbeats
from resiliency.settings import environment

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=False)

#: Colour of each state.
_COLORS = {"running": "green", "stopped": "bold red", "ended": "yellow", "earlier attempt": "dim", "unknown": "cyan"}


def main(words: Sequence[str]) -> int:
    """Runs the command line. The app runs without a parent, because below a group no option could follow the folder."""
    app(args=list(words), prog_name="resiliency heartbeat")
    return 0


@app.command()
def heartbeat(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="[DIRECTORY]",
            parser=absolute_path,
            help="Folder with the heartbeats.",
            show_default="$RESILIENCY_HEARTBEAT_DIR",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows what the ranks of this host are doing: phase, step, attempt, and for how long they have been quiet.

    Reads files in shared memory, so it works even when ranks hang or have ended. Exit status: 0 there are heartbeats, 1
    there are none, 2 wrong arguments.
    """
    folder = directory or environment().heartbeat_dir
    if not folder:
        raise typer.BadParameter("pass a folder, or set RESILIENCY_HEARTBEAT_DIR", param_hint="DIRECTORY")
    try:
        found = read_heartbeats(folder)
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="DIRECTORY") from None
    if as_json:
        typer.echo(json.dumps([_row(one) for one in found], indent=2))
    elif found:
        _print(found)
    else:
        typer.echo(f"no heartbeats in {folder}: ranks need HeartbeatCallback, or RESILIENCY_HEARTBEAT_DIR", err=True)
    raise typer.Exit(int(not found))


def _row(one: RankHeartbeat) -> dict[str, object]:
    return {
        "rank": one.rank,
        "state": one.state,
        "phase": str(one.page.phase),
        "step": one.page.step,
        "attempt": one.page.attempt,
        "quiet_s": round(one.quiet_s, 3),
        "longest_s": round(one.page.longest_s, 6),
        "beats": one.page.beats,
        "pid": one.pid,
        "host": one.host,
        "run": one.run,
        "began": one.began,
    }


def _print(found: list[RankHeartbeat]) -> None:
    from rich.markup import escape

    numbers = ("rank", "step", "attempt", "quiet for", "longest", "process")
    names = ("rank", "state", "phase", "step", "attempt", "quiet for", "longest", "process", "host")
    rows = table(*names, right=numbers)
    for one in found:
        rows.add_row(
            str(one.rank),
            f"[{_COLORS[one.state]}]{one.state}[/]",
            str(one.page.phase),
            str(one.page.step) if one.page.step >= 0 else "",
            str(one.page.attempt),
            f"{one.quiet_s:.1f} s",
            f"{one.page.longest_s:.3g} s" if one.page.longest_s else "",
            str(one.pid),
            escape(one.host),
        )
    console().print(rows)
