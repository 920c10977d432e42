"""Figures of the comparison. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Measured", "Row", "best_of", "rows_of", "table_of"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurement of one training.

    Attributes:
        writer: "none", "stock" or "resiliency".
        interval: steps between saves; 0 without saves.
        steps: number of timed steps.
        wall_s: seconds they took, with the wait at their end for saves that were still being written.
        saves: number of saves in that time.
    """

    writer: str
    interval: int
    steps: int
    wall_s: float
    saves: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        step_s: mean time of a step, saves included.
        lost_per_save_s: time that a save costs the training.
        goodput: share of the time that trained, without failures.
        goodput_with_failures: the same with a failure every ``mtbf_s``, each of which costs the restart and, on
            average, half of the steps between two saves.
    """

    writer: str
    interval: int
    saves: int
    step_s: float
    lost_per_save_s: float
    goodput: float
    goodput_with_failures: float


def best_of(measured: Sequence[Measured]) -> list[Measured]:
    """The fastest training of each writer and interval, because other work on the machine can only slow one down."""
    best: dict[tuple[str, int], Measured] = {}
    for one in measured:
        known = best.setdefault((one.writer, one.interval), one)
        if one.wall_s < known.wall_s:
            best[one.writer, one.interval] = one
    return list(best.values())


def rows_of(measured: Sequence[Measured], *, mtbf_s: float, restart_s: float) -> list[Row]:
    """The lines of the table. Trainings without saves say what a step takes.

    Raises:
        ValueError: there is no training without saves.
    """
    bare = [one for one in measured if not one.interval]
    if not bare:
        raise ValueError("a training without saves is needed to know what a step takes")
    reference_s = sum(one.wall_s for one in bare) / sum(one.steps for one in bare)
    rows = []
    for one in measured:
        if not one.interval:
            continue
        step_s = one.wall_s / one.steps
        goodput = min(1.0, reference_s / step_s)
        lost_s = restart_s + one.interval / 2 * step_s
        rows.append(
            Row(
                writer=one.writer,
                interval=one.interval,
                saves=one.saves,
                step_s=step_s,
                lost_per_save_s=max(0.0, one.wall_s - one.steps * reference_s) / max(1, one.saves),
                goodput=goodput,
                goodput_with_failures=goodput * max(0.0, 1 - lost_s / mtbf_s),
            )
        )
    return sorted(rows, key=lambda row: (row.interval, row.writer))


def table_of(rows: Sequence[Row], *, mtbf_s: float, restart_s: float) -> str:
    """The table as text."""
    head = ("steps between saves", "writer", "step", "lost per save", "goodput", f"with a failure every {mtbf_s:g} s")
    lines = [
        (
            str(row.interval),
            row.writer,
            f"{row.step_s * 1000:.0f} ms",
            f"{row.lost_per_save_s * 1000:.0f} ms",
            f"{row.goodput:.1%}",
            f"{row.goodput_with_failures:.1%}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    text = "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *lines)
    )
    best = max(rows, key=lambda row: row.goodput_with_failures)
    return (
        f"{text}\n\nA failure costs a restart of {restart_s:g} s and half of the steps between two saves. Best: a"
        f" save every"
        f" {best.interval} steps by {best.writer}, {best.goodput_with_failures:.1%} goodput."
    )
