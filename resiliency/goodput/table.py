"""Prints summaries as tables for a terminal, with rich."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.goodput.words import duration, figure, precise

__all__ = ["compare", "duration", "figure", "largest_causes", "precise", "print_report", "render", "unit_word"]

BAR_CELLS = 24
INCIDENTS_SHOWN = 20
ATTEMPTS_SHOWN = 12
SPANS_SHOWN = 10
CURVE_CELLS = 48
_BLOCKS = "▁▂▃▄▅▆▇█"


def render(summary: dict[str, Any]) -> RenderableType:
    """The whole report of one run."""
    blocks: list[RenderableType] = [_head(summary), _buckets(summary), _levers(summary), _lines(summary)]
    if summary["over_time"]:
        blocks.append(_over_time(summary))
    if len(summary["attempts"]) > 1:
        blocks.append(_attempts(summary))
    if summary["incidents"]:
        blocks.append(_incidents(summary))
    if summary["spans"]:
        blocks.append(_spans(summary))
    if summary["stragglers"]:
        blocks.append(_stragglers(summary))
    if summary["checkpoints"]:
        blocks.append(_checkpoints(summary))
    if summary["notes"] or summary["quality"]:
        blocks.append(_quality(summary))
    return Group(*blocks)


def print_report(summaries: Sequence[dict[str, Any]], console: Console) -> None:
    for summary in summaries:
        console.print(render(summary))


def _head(summary: dict[str, Any]) -> Panel:
    text = Text()
    text.append(f"{figure(summary['goodput'])} ", style="bold green")
    text.append("goodput", style="green")
    text.append(f"   {duration(summary['wall_s'])} wall", style="default")
    text.append(
        f"   {summary['capacity']:,} {_units(summary)}   {duration(summary['gpu_s'])} of {unit_word(summary)} time\n"
    )
    text.append(f"{summary['start_utc']} to {summary['end_utc']} UTC, {summary['events']:,} events", style="dim")
    # A Text, like everything that comes from a log, because rich reads words in brackets in a str as a style.
    title = Text(f"goodput of {summary['run']}")
    return Panel(text, title=title, title_align="left", border_style="dim", expand=False)


def _units(summary: dict[str, Any]) -> str:
    return unit_word(summary) + ("" if summary["capacity"] == 1 else "s")


def unit_word(summary: dict[str, Any]) -> str:
    """The unit of the capacity: "GPU", "rank" or "host"."""
    if summary["gpus_per_rank"] > 1:
        return "GPU"
    return "host" if summary["unit"] == "host" else "rank" if summary["device"] == "cpu" else "GPU"


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _buckets(summary: dict[str, Any]) -> Table:
    table = _table("Where every second went")
    table.add_column("bucket", no_wrap=True)
    for name in ("share", "wall", f"{unit_word(summary)} time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=False)  # narrowed first on a narrow terminal
    largest = max((row["share"] for row in summary["buckets"]), default=0.0) or 1.0
    for row in summary["buckets"]:
        info = BUCKETS[Bucket(row["bucket"])]
        bar = "█" * round(row["share"] / largest * BAR_CELLS) or ("▏" if row["share"] > 0 else "")
        dim = "" if row["share"] > 0 else "dim"
        table.add_row(
            Text(info.label, style=dim),
            Text(figure(row["share"]), style=dim),
            Text(duration(row["wall_s"]), style=dim),
            Text(duration(row["gpu_s"]), style=dim),
            Text(bar, style=info.dark, no_wrap=True, overflow="crop"),
        )
        for part in row["parts"]:
            cells = (f"  {part['label']}", "", duration(part["wall_s"]), duration(part["gpu_s"]), "")
            table.add_row(*(Text(cell, style="dim") for cell in cells))
    table.add_section()
    total = sum(row["wall_s"] for row in summary["buckets"])
    gpu = sum(row["gpu_s"] for row in summary["buckets"])
    table.add_row(Text("Sum", style="bold"), "100.0 %", duration(total), duration(gpu), "", end_section=True)
    return table


def _levers(summary: dict[str, Any]) -> Text:
    """How to make the largest causes smaller: advice from measured figures, else the general lever of the bucket."""
    text = Text()
    for row in largest_causes(summary):
        text.append(f"{row['label']}, {figure(row['share'])}: ", style="bold")
        text.append((f"{row['advice']['text']}." if row["advice"] else row["lever"]) + "\n")
    return text


def largest_causes(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the at most three largest buckets that have a lever and more than 1 % of the time, largest first."""
    rows = [row for row in summary["buckets"] if row["lever"] and row["share"] > 0.01]
    return sorted(rows, key=lambda row: -row["share"])[:3]


def _lines(summary: dict[str, Any]) -> Text:
    text = Text()
    steps = summary["steps"]
    if steps["run"]:
        text.append(f"Steps: {steps['run']:,} run, {steps['kept']:,} kept, {steps['thrown_away']:,} thrown away")
        if steps["usual_s"]:
            text.append(f"; usual step {precise(steps['usual_s'])}")
            times = summary["step_times"]
            if times["best_s"]:
                text.append(f", best stable {precise(times['best_s'])}")
            if times["deviation_s"]:
                text.append(f", deviation {precise(times['deviation_s'])}")
        text.append("\n")
    return text


def _over_time(summary: dict[str, Any]) -> Text:
    """Rolling goodput as a row of blocks, by time; a gap is time that was left out."""
    points, wall = summary["over_time"], max(1e-9, summary["end"] - summary["start"])
    cells: list[list[float]] = [[] for _ in range(CURVE_CELLS)]
    for point in points:
        place = (point["time"] - summary["start"]) / wall * CURVE_CELLS
        cells[min(CURVE_CELLS - 1, max(0, math.ceil(place) - 1))].append(point["goodput"])
    means = [sum(cell) / len(cell) if cell else None for cell in cells]
    text = Text("Goodput over time  ", style="default")
    blocks = (" " if mean is None else _BLOCKS[min(len(_BLOCKS) - 1, int(mean * len(_BLOCKS)))] for mean in means)
    text.append("".join(blocks), style="green")
    text.append(
        f"  {figure(points[-1]['goodput'])} at the end, a cell is {duration(wall / CURVE_CELLS)}\n", style="dim"
    )
    return text


def _spans(summary: dict[str, Any]) -> Table:
    table = _table("Spans that the script names")
    table.add_column("span", no_wrap=True)
    for name in ("times", "ranks", "mean", "longest", "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary["spans"][:SPANS_SHOWN]:
        lengths = (duration(row[key]) for key in ("mean_s", "longest_s", "total_s"))
        table.add_row(Text(row["span"]), f"{row['count']:,}", f"{row['ranks']:,}", *lengths)
    hidden = len(summary["spans"]) - SPANS_SHOWN
    if hidden > 0:
        table.caption, table.caption_justify = f"{hidden} shorter ones are not shown; --json has them", "left"
    return table


def _attempts(summary: dict[str, Any]) -> Table:
    table = _table("Attempts")
    for name, justify in (("", "right"), ("start (UTC)", "left"), ("length", "right"), ("ranks", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    table.add_column("largest badput", overflow="fold")  # folded first on a narrow terminal
    table.add_column("end", no_wrap=True)
    shown = summary["attempts"]
    if len(shown) > ATTEMPTS_SHOWN:
        shown = shown[: ATTEMPTS_SHOWN // 2] + shown[-ATTEMPTS_SHOWN // 2 :]
    for row in shown:
        bad = {name: share for name, share in row["shares"].items() if name != Bucket.PRODUCTIVE.value}
        worst = max(bad, key=lambda name: bad[name]) if bad else ""
        span = "-" if row["to_step"] is None else f"{row['from_step'] or 0:,} to {row['to_step']:,}"
        table.add_row(
            str(row["attempt"]),
            row["start_utc"][5:16],
            duration(row["wall_s"]),
            f"{row['ranks']:,}",
            span,
            figure(row["shares"].get(Bucket.PRODUCTIVE.value, 0.0)),
            f"{BUCKETS[Bucket(worst)].label} {figure(bad[worst])}" if worst else "-",
            row["outcome"],
        )
    hidden = len(summary["attempts"]) - len(shown)
    if hidden:
        table.caption = f"{hidden} attempts in between are not shown; --json has all"
    return table


def _incidents(summary: dict[str, Any]) -> Table:
    table = _table("Incidents")
    table.add_column("when (UTC)", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("where", overflow="fold")
    table.add_column("remedy", overflow="fold")
    table.add_column("lost steps", justify="right", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    dearest = sorted(summary["incidents"], key=lambda row: -row["cost_gpu_s"])[:INCIDENTS_SHOWN]
    for row in sorted(dearest, key=lambda row: row["time"]):
        cost = f"{duration(row['cost_gpu_s'])}" if row["cost_gpu_s"] else "-"
        lost = f"{row['lost_steps']:,}" if row["lost_steps"] else "-"
        told = (Text(row[key]) for key in ("what", "where", "remedy"))
        table.add_row(row["time_utc"][5:19], *told, lost, cost)
    hidden = len(summary["incidents"]) - len(dearest)
    table.caption = f"cost in {unit_word(summary)} time" + (f"; {hidden} cheaper ones are not shown" if hidden else "")
    table.caption_justify = "left"
    return table


def _stragglers(summary: dict[str, Any]) -> Table:
    table = _table("Stragglers")
    for name, justify in (
        ("rank", "right"),
        ("host", "left"),
        ("cost", "right"),
        ("slowest in", "right"),
        ("cause", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in summary["stragglers"][:5]:
        table.add_row(
            str(row["rank"]),
            Text(row["host"]),
            duration(row["cost_gpu_s"]),
            f"{row['steps']:,} step{'' if row['steps'] == 1 else 's'}",
            row["cause"],
        )
    return table


def _checkpoints(summary: dict[str, Any]) -> Table:
    table = _table("Checkpoints")
    table.add_column("tier", no_wrap=True)
    columns = ("saved", "durable", "loaded", "failed", "skipped", "corrupt", "repaired")
    used = [name for name in columns if any(row[name] for row in summary["checkpoints"])]
    for name in (*used, "time to durable", "time to load"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary["checkpoints"]:
        times = [duration(row[key]) if row[key] is not None else "-" for key in ("durable_mean_s", "restore_mean_s")]
        table.add_row(Text(row["tier"]), *(f"{row[name]:,}" for name in used), *times)
    return table


def _quality(summary: dict[str, Any]) -> Text:
    text = Text()
    for note in summary["notes"]:
        text.append("Note: ", style="yellow")
        text.append(note + "\n")
    if summary["quality"]:
        counted = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in summary["quality"].items())
        text.append(f"Log quality: {counted}\n", style="dim")
    return text


def compare(left: dict[str, Any], right: dict[str, Any]) -> Table:
    """Two runs side by side; the last column is the change in percentage points."""
    table = _table(f"{left['run']} and {right['run']}")
    table.add_column("", no_wrap=True)
    for name in ("A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    for a, b in zip(left["buckets"], right["buckets"], strict=True):
        if not (a["share"] or b["share"]):
            continue
        points = (b["share"] - a["share"]) * 100
        good = (points > 0) == (a["bucket"] == Bucket.PRODUCTIVE.value)
        style = "dim" if abs(points) < 0.05 else "green" if good else "red"
        table.add_row(a["label"], figure(a["share"]), figure(b["share"]), Text(f"{points:+.1f} points", style=style))
    table.add_section()
    facts: list[tuple[str, str, str]] = [
        ("Wall", duration(left["wall_s"]), duration(right["wall_s"])),
        ("Capacity", f"{left['capacity']:,} {_units(left)}", f"{right['capacity']:,} {_units(right)}"),
        ("Attempts", f"{len(left['attempts']):,}", f"{len(right['attempts']):,}"),
        ("Steps kept", f"{left['steps']['kept']:,}", f"{right['steps']['kept']:,}"),
        ("Steps thrown away", f"{left['steps']['thrown_away']:,}", f"{right['steps']['thrown_away']:,}"),
    ]
    usual = [precise(summary["steps"]["usual_s"]) if summary["steps"]["usual_s"] else "-" for summary in (left, right)]
    ended = [f"{sum(row['ended_attempt'] for row in summary['incidents']):,}" for summary in (left, right)]
    facts += [("Usual step", usual[0], usual[1]), ("Incidents that ended an attempt", ended[0], ended[1])]
    for name, a_text, b_text in facts:
        table.add_row(name, a_text, b_text, "")
    return table
