"""What all ``resiliency ckpt`` commands share: arguments, errors, consoles, and the check with its progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol

import typer

from resiliency.cli._terminal import console
from resiliency.paths import absolute_path

if TYPE_CHECKING:
    from resiliency.inspection.survey import StepView, Target
    from resiliency.inspection.verify import Finding

__all__ = [
    "JsonOption",
    "PathArgument",
    "PathsArgument",
    "RunOption",
    "bar",
    "check",
    "errors",
    "fail",
    "open_targets",
]

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", parser=absolute_path, help="A folder, a checkpoint, a step folder, or a URL of these."
    ),
]
_PATHS_HELP = "Folders, checkpoints, step folders, or URLs of these."
PathsArgument = Annotated[list[str], typer.Argument(metavar="PATH...", parser=absolute_path, help=_PATHS_HELP)]
RunOption = Annotated[str | None, typer.Option("--run", help="Only this run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str, status: int) -> NoReturn:
    typer.echo(f"ckpt: {message}", err=True)
    raise typer.Exit(status)


@contextmanager
def errors() -> Iterator[None]:
    """Turns an expected error into one line on standard error and an exit status: 2 for a wrong path or argument, 1 for
    all others, 130 after Ctrl-C."""
    from resiliency.errors import ConfigError, NoCheckpointFound, ResiliencyError

    try:
        yield
    except (ConfigError, NoCheckpointFound, FileNotFoundError) as error:
        fail(str(error), 2)
    except (ResiliencyError, OSError) as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


@contextmanager
def open_targets(paths: list[str]) -> Iterator[list[Target]]:
    """Resolves the paths to targets; closes connections to object stores at the end."""
    from resiliency.inspection.survey import close_tier, find

    with errors():
        found: list[Target] = []
        try:
            for path in paths:
                found.append(find(path))
            yield found
        finally:
            for target in found:
                close_tier(target.tier)


class _Advance(Protocol):
    def __call__(self, count: int, text: str = "", /) -> None: ...


@contextmanager
def bar(text: str, total: int, *, quiet: bool) -> Iterator[_Advance]:
    """Shows a progress bar on a terminal; gives a function that takes the bytes done since its last call, and a new
    text unless it is empty."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    stderr = console(err=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as progress:
        task = progress.add_task(text, total=total)

        def advance(count: int, text: str = "") -> None:
            progress.update(task, advance=count, description=text or None)

        yield advance


def check(views: list[StepView], quiet: bool) -> list[Finding]:
    from resiliency.inspection.verify import bytes_to_check, check_step

    findings = []
    with bar("verify", sum(map(bytes_to_check, views)), quiet=quiet) as advance:
        for view in views:
            advance(0, f"{view.run} step {view.id.step}")
            findings += check_step(view, advance=advance)
    return findings
