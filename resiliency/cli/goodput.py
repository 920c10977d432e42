"""``resiliency goodput``: report, compare, watch, and what belongs to a dashboard of these."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from resiliency.cli._terminal import console
from resiliency.paths import absolute_path

if TYPE_CHECKING:
    from resiliency.goodput.ledger import Ledger
    from resiliency.goodput.windows import Windows
    from resiliency.telemetry.reader import LogReader
    from resiliency.telemetry.sinks import ScalarFile

__all__ = ["app"]

app = typer.Typer(
    help="Show where every second of a run went.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _path(text: str) -> Path:
    return Path(absolute_path(text))


LogOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--log", metavar="PATH", parser=_path, help="Checkpoint folder, events folder or log file; repeatable."
    ),
]
MoreLogs = Annotated[
    list[Path] | None,
    typer.Argument(help="More checkpoint folders, events folders or log files.", metavar="[DIR|FILE]...", parser=_path),
]
RunOption = Annotated[str | None, typer.Option("--run", "--job-name", help="Only this run.")]
ReferenceOption = Annotated[
    float | None,
    typer.Option(
        "--reference-step-time",
        min=0.0,
        max=1e9,  # also refuses inf, which JSON cannot hold
        help="Seconds a step should take: all time beyond it is slowdown.",
    ),
]
CapacityOption = Annotated[int | None, typer.Option("--capacity", min=1, help="Ranks that the whole job should have.")]
GpusOption = Annotated[int, typer.Option("--gpus-per-rank", min=1, help="GPUs each rank (or logging host) stands for.")]
UntilOption = Annotated[
    str,
    typer.Option(
        "--until", help="End of the account: last (the last event), now, an ISO time, or an offset as of --since."
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        help="Start of the account: an ISO time, or an offset from the run's start (90s, 1h30m) or back from its end"
        " (-2h).",
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="A..B", help="Leave out the time from A to B (times or offsets as of --since); repeatable."
    ),
]
PrometheusOption = Annotated[
    Path | None,
    typer.Option(
        "--prometheus",
        metavar="FILE",
        parser=_path,
        help="Also write gauges to this file, a *.prom for node_exporter's textfile collector.",
    ),
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        parser=_path,
        help="Also write TensorBoard scalars below this folder, in one folder for each run.",
    ),
]


T = TypeVar("T")

#: Exit status for wrong arguments or a path without a log, as of the other commands.
_WRONG = 2
_NOTHING_LEFT = "--since, --until and --exclude leave nothing of the run"


def _fail(message: str) -> NoReturn:
    typer.echo(f"goodput: {message}", err=True)
    raise typer.Exit(_WRONG)


def _windows(since: str | None, until: str, exclude: list[str] | None) -> tuple[Windows, float | None]:
    """The part of a run's time to account for, and the moment (UTC seconds) up to which time after the last event
    counts; None: that time does not count."""
    from resiliency.goodput.windows import Windows, parse_moment, parse_span

    counted, last = None, None
    if until == "now":
        counted = time.time()
    elif until != "last":
        try:
            moment = parse_moment(until)
        except ValueError:
            _fail(
                f"--until {until!r} is neither last, now nor an ISO time like 2026-01-31T12:00:00Z, nor an offset like"
                " 90s, 1h30m or -30m"
            )
        counted, last = (None, moment) if moment.is_offset else (moment.seconds, None)
    try:
        first = None if since is None else parse_moment(since)
        left_out = tuple(parse_span(text) for text in exclude or ())
    except ValueError as error:
        _fail(f"--since or --exclude: {error}")
    return Windows(since=first, until=last, exclude=left_out), counted


def _or_fail(call: Callable[..., T], *arguments: Any) -> T:
    """Returns what ``call`` returns; ends the command with one line when it raises a ResiliencyError."""
    from resiliency.errors import ResiliencyError

    try:
        return call(*arguments)
    except ResiliencyError as error:
        _fail(str(error))


def _read(paths: list[Path]) -> LogReader:
    from resiliency.telemetry.reader import read_logs

    if not paths:
        _fail("say which log to read: --log DIR or --log FILE")
    return _or_fail(read_logs, paths)


def _ledgers(
    reader: LogReader,
    run: str | None,
    until: float | None,
    capacity: int | None,
    gpus: int,
    windows: Windows | None = None,
    reference: float | None = None,
) -> list[Ledger]:
    """The accounts of the chosen runs, ordered by name; ends the command when there is none.

    Raises:
        ConfigError: ``windows`` do not fit a run.
    """
    from resiliency.goodput.ledger import account
    from resiliency.goodput.windows import ALL_TIME
    from resiliency.telemetry.supervised import join_supervisors

    runs = join_supervisors(reader.collector.runs)
    if run is not None and run not in runs:
        _fail(f"no run named {run!r} in these logs; there are: {', '.join(sorted(runs)) or 'none'}")
    chosen = [runs[run]] if run is not None else [runs[name] for name in sorted(runs)]
    if not chosen and reader.measurement_lines:
        _fail("these are logs of ml-goodput-measurement, which has other events; its own library reads them")
    if not chosen:
        _fail("there is no event in these logs; does this job use ModelCheckpoint or GoodputCallback?")
    return [
        account(
            facts,
            until=until,
            capacity=capacity,
            gpus_per_rank=gpus,
            windows=windows or ALL_TIME,
            reference_step_s=reference or None,
        )
        for facts in chosen
    ]


def _up_to_now(
    reader: LogReader, run: str | None, capacity: int | None, gpus: int, windows: Windows, reference: float | None
) -> list[Ledger]:
    """Like :func:`_ledgers`, for jobs that may still run: when one of them has no end in the log, the time from the
    last event to now counts, too."""
    ledgers = _ledgers(reader, run, None, capacity, gpus, windows, reference)
    if any(ledger.timings and ledger.timings[-1].outcome == "open" for ledger in ledgers):
        now = max(time.time(), *(ledger.end for ledger in ledgers))  # a host's clock may be ahead of ours
        ledgers = _ledgers(reader, run, now, capacity, gpus, windows, reference)
    return ledgers


def _leave_nothing(windows: Windows, ledgers: list[Ledger], until: float | None = None) -> bool:
    return (bool(windows) or until is not None) and not any(ledger.wall_us for ledger in ledgers)


def _names(paths: Sequence[Path]) -> str:
    from resiliency.telemetry.plain_text import plain

    names = ", ".join(plain(path.name) for path in paths[:5])
    return names + (f" and {len(paths) - 5} others" if len(paths) > 5 else "")


def _summaries(reader: LogReader, ledgers: list[Ledger]) -> list[dict[str, Any]]:
    from resiliency.goodput.summary import summarize
    from resiliency.telemetry.plain_text import plain

    # Lines and files without events belong to no run; they are reported with the first.
    cut = sorted(reader.cut.items())
    notes = [f"{plain(name)} is cut or damaged ({why}); it was counted up to there." for name, why in cut]
    if reader.left_out:
        held = "they hold" if reader.left_out[1:] else "it holds"
        notes.append(f"Left out, because {held} no event: {_names(reader.left_out)}.")
    if reader.unread:
        notes.append(f"Not read, because they are neither logs nor rotated or gzipped logs: {_names(reader.unread)}.")
    if reader.measurements:
        names = _names([Path(name) for name in reader.measurements])
        notes.append(f"Not read, being of ml-goodput-measurement, whose own library reads them: {names}.")
    return [
        summarize(
            ledger,
            torn_lines=reader.torn_lines if number == 0 else 0,
            foreign_lines=reader.foreign_lines if number == 0 else 0,
            notes=notes if number == 0 else (),
        )
        for number, ledger in enumerate(ledgers)
    ]


@app.command()
def report(
    more: MoreLogs = None,
    log: LogOption = None,
    run: RunOption = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", parser=_path, help="Also write one self-contained HTML page to this file."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    reference_step_time: ReferenceOption = None,
    since: SinceOption = None,
    until: UntilOption = "last",
    exclude: ExcludeOption = None,
    capacity: CapacityOption = None,
    gpus_per_rank: GpusOption = 1,
    prometheus: PrometheusOption = None,
    tensorboard: TensorBoardOption = None,
) -> None:
    """Print where the time of each run went."""
    windows, end = _windows(since, until, exclude)
    reader = _read([*(log or []), *(more or [])])
    ledgers = _or_fail(_ledgers, reader, run, end, capacity, gpus_per_rank, windows, reference_step_time)
    if _leave_nothing(windows, ledgers, end):
        _fail(_NOTHING_LEFT)
    summaries = _summaries(reader, ledgers)
    if html is not None:
        _write_page(html, list(zip(summaries, ledgers, strict=True)))
    with _Gauges(prometheus, tensorboard) as gauges:
        gauges.write(summaries)
    if as_json:
        typer.echo(_json({"runs": summaries}))
        return
    from resiliency.goodput.table import print_report

    print_report(summaries, console(markup=False))
    if html is not None:
        typer.echo(f"page written to {html}")


class _Gauges:
    """Writes the gauges that ``--prometheus`` and ``--tensorboard`` ask for; ends the command with one line when that
    fails. A context manager, which closes TensorBoard's files."""

    def __init__(self, prometheus: Path | None, tensorboard: Path | None) -> None:
        self._prometheus, self._tensorboard = prometheus, tensorboard
        self._files: dict[str, ScalarFile] = {}

    def __enter__(self) -> _Gauges:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, summaries: list[dict[str, Any]]) -> None:
        from resiliency.goodput.gauges import write_prometheus, write_tensorboard
        from resiliency.telemetry.sinks import ScalarFile

        where = self._prometheus
        try:
            if self._prometheus is not None:
                write_prometheus(self._prometheus, summaries)
            if self._tensorboard is not None:
                where = self._tensorboard
                for summary in summaries:
                    name = str(summary["run"]).replace("/", "_").lstrip(".") or "_"  # a log may hold any run name
                    if name not in self._files:
                        self._files[name] = ScalarFile(str(self._tensorboard / name))
                    write_tensorboard(self._files[name], summary)
        except ImportError:
            _fail("--tensorboard needs tensorboard; install resiliency[tensorboard]")
        except OSError as error:
            _fail(f"the gauges cannot be written to {where}: {error.strerror or error}")


def _write_page(path: Path, runs: list[tuple[dict[str, Any], Ledger]]) -> None:
    from resiliency.errors import ResiliencyError
    from resiliency.goodput.page import write_page

    try:
        write_page(path, runs)
    except ResiliencyError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"the page {path} cannot be written: {error.strerror or error}")


def _json(content: dict[str, Any]) -> str:
    from resiliency.goodput.summary import SCHEMA_VERSION

    return json.dumps({"schema": SCHEMA_VERSION, **content}, indent=2, allow_nan=False)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", parser=_path, help="Log of the first run.")],
    b: Annotated[Path, typer.Argument(metavar="B", parser=_path, help="Log of the second run.")],
    run_a: Annotated[
        str | None, typer.Option("--run-a", help="The run to compare from A; needed when A has several.")
    ] = None,
    run_b: Annotated[
        str | None, typer.Option("--run-b", help="The run to compare from B; needed when B has several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    reference_step_time: ReferenceOption = None,
    since: SinceOption = None,
    until: UntilOption = "last",
    exclude: ExcludeOption = None,
    capacity: CapacityOption = None,
    gpus_per_rank: GpusOption = 1,
) -> None:
    """Print two runs side by side."""
    windows, end = _windows(since, until, exclude)
    both = []
    for path, run in ((a, run_a), (b, run_b)):
        reader = _read([path])
        ledgers = _or_fail(_ledgers, reader, run, end, capacity, gpus_per_rank, windows, reference_step_time)
        if _leave_nothing(windows, ledgers, end):
            _fail(_NOTHING_LEFT)
        if len(ledgers) > 1:
            _fail(
                f"{path} holds several runs ({', '.join(ledger.run for ledger in ledgers)}); choose with --run-a or"
                " --run-b"
            )
        both += _summaries(reader, ledgers)
    if as_json:
        typer.echo(_json({"runs": both}))
        return
    from resiliency.goodput.table import compare as side_by_side

    console(markup=False).print(side_by_side(*both))


@app.command()
def watch(
    more: MoreLogs = None,
    log: LogOption = None,
    run: RunOption = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=86400.0, help="Seconds between refreshes.")
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Stop after this many refreshes; 0: until Ctrl-C.")
    ] = 0,
    reference_step_time: ReferenceOption = None,
    since: SinceOption = None,
    exclude: ExcludeOption = None,
    capacity: CapacityOption = None,
    gpus_per_rank: GpusOption = 1,
    prometheus: PrometheusOption = None,
    tensorboard: TensorBoardOption = None,
) -> None:
    """Show the account of a running job and refresh it; with --since -1h, of the last hour only."""
    from rich.console import Group
    from rich.live import Live

    from resiliency.errors import ResiliencyError
    from resiliency.goodput.table import render
    from resiliency.telemetry.reader import LogReader, find_logs
    from resiliency.telemetry.supervised import join_supervisors

    windows = dataclasses.replace(_windows(since, "last", exclude)[0], is_running=True)
    paths = [*(log or []), *(more or [])]
    missing = [path for path in paths if not path.exists()]
    if missing:
        _fail(f"there is no {missing[0]}; give a folder, in which a log may begin later, or a log file")
    reader = _read(paths) if not paths else LogReader()
    stop = threading.Event()
    with (
        _Gauges(prometheus, tensorboard) as gauges,
        Live(console=console(markup=False), auto_refresh=False, vertical_overflow="crop") as live,
        contextlib.suppress(KeyboardInterrupt),  # Ctrl-C is the usual end of a watch
    ):
        looked = 0
        while True:
            waits = "for the first event"
            try:
                reader.read(find_logs(paths), final=False)
            except ResiliencyError as error:
                waits = f"for a log: {error}"
            begun = join_supervisors(reader.collector.runs)
            if run is not None and run not in begun:
                there = ", ".join(sorted(begun)) or "none"
                live.update(f"waiting for run {run!r}; so far there are: {there}", refresh=True)
            elif not begun:
                live.update(f"waiting {waits}", refresh=True)
            else:
                try:
                    ledgers = _up_to_now(reader, run, capacity, gpus_per_rank, windows, reference_step_time)
                except ResiliencyError as error:  # the options may fit the run later
                    live.update(f"waiting: {error}", refresh=True)
                    ledgers = []
                if ledgers and _leave_nothing(windows, ledgers):
                    live.update("waiting: --since and --exclude leave nothing of the run so far", refresh=True)
                elif ledgers:
                    summaries = _summaries(reader, ledgers)
                    live.update(Group(*(render(summary) for summary in summaries)), refresh=True)
                    gauges.write(summaries)
            looked += 1
            if rounds and looked >= rounds:
                return
            stop.wait(interval)


@app.command()
def dashboard() -> None:
    """Print a Grafana dashboard for the gauges of --prometheus, as JSON to import in Grafana."""
    from resiliency.goodput.gauges import dashboard as text

    typer.echo(text(), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of what report --json and compare --json print."""
    from resiliency.goodput.summary import schema as text

    typer.echo(text(), nl=False)
