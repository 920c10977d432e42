"""Formats rows and targets as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks._contenders import Entry
from benchmarks._targets import Target

__all__ = ["isolated_table", "loop_table", "reasons", "target_table"]

Row = Mapping[str, Any]
_NO_FIGURE = "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NO_FIGURE
    return f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return _NO_FIGURE if value is None else f"{value:.2f}"


_ISOLATED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("set-up", "setup_s", _seconds),
    ("first\nstall", "first_stall_s", _seconds),
    ("first\ndurable", "first_durable_s", _seconds),
    ("warm:\ncall", "beside_call_s", _seconds),
    ("fence after\ncompute", "beside_fence_s", _seconds),
    ("safe\nstall", "beside_stall_s", _seconds),
    ("worst\nstall", "stall_s", _seconds),
    ("com-\nmitted", "committed_s", _seconds),
    ("durable", "durable_s", _seconds),
    ("durable\nmeans", "flush", str),
    ("compute\nrate", "compute_ratio", _ratio),
    ("restore", "restore_s", _seconds),
    ("RAM\nx state", "ram_x_state", _ratio),
)
_LOOP: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step", "step_s", _seconds),
    ("first save\nlost", "first_lost_s", _seconds),
    ("lost\nper save", "lost_s", _seconds),
    ("90 %\nfrom", "lost_low_s", _seconds),
    ("90 %\nto", "lost_high_s", _seconds),
    ("of it in the\nstep that saves", "at_save_s", _seconds),
    ("mean lost", "lost_mean_s", _seconds),
    ("saves", "saves", str),
    ("restore", "restore_s", _seconds),
)


def isolated_table(title: str, entries: Sequence[Entry], rows: Mapping[str, Row]) -> Table:
    """One row per contender; seconds, unless the column's head names another unit."""
    return _table(title, entries, rows, _ISOLATED)


def loop_table(title: str, entries: Sequence[Entry], rows: Mapping[str, Row]) -> Table:
    """One row per contender: training seconds lost per save, all waits included."""
    return _table(title, entries, rows, _LOOP)


def _table(
    title: str,
    entries: Sequence[Entry],
    rows: Mapping[str, Row],
    columns: Sequence[tuple[str, str, Callable[[Any], str]]],
) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("contender", no_wrap=True)
    for head, key, _ in columns:
        table.add_column(head, justify="left" if key == "flush" else "right", no_wrap=True)
    for entry in entries:
        row = rows.get(entry.name)
        if row is None:
            continue
        style = {"ours": "bold green", "floor": "dim", "bound": "dim", "control": "dim"}.get(entry.role)
        if row["status"] == "ok":
            cells = [show(row[key]) if row.get(key) is not None else _NO_FIGURE for _, key, show in columns]
        else:
            cells = [row["status"], *[""] * (len(columns) - 1)]
        table.add_row(entry.label, *cells, style=style)
    return table


def reasons(entries: Iterable[Entry], rows: Mapping[str, Row]) -> list[str]:
    """One line for each contender that is missing from a table or failed in some round."""
    lines = []
    for entry in entries:
        row = rows.get(entry.name, {})
        if row.get("reason"):
            lines.append(f"{entry.label}: {row['reason']}")
    return lines


def target_table(targets: Sequence[Target]) -> Table:
    """Target, limit, measured ratio, its two figures and whether it is met."""
    table = Table(title="Targets (ratios within this run)", title_justify="left", pad_edge=False)
    for head in ("where", "target", "limit", "measured", "met", "from"):
        table.add_column(head, justify="right" if head in ("limit", "measured") else "left", no_wrap=True)
    for target in targets:
        met = {True: "[green]yes", False: "[red]no", None: "not measured"}[target.met]
        limit = f"{'<=' if target.at_most else '>='} {target.limit:g}"
        table.add_row(target.where, target.text, limit, _ratio(target.measured), met, target.figures)
    return table
