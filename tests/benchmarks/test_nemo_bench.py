"""The figures of ``benchmarks.nemo``, from what its job tells."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.nemo import EVERY, figures_of


def told(*, steps: int, first_s: float, save_s: float) -> list[dict[str, Any]]:
    """A run with steps of a second; the step after each save takes longer, and so do those before the first."""
    lines: list[dict[str, Any]] = []
    now = 0.0
    for step in range(1, steps + 1):
        now += 1.0 + (first_s if step <= EVERY else save_s if step % EVERY == 1 else 0.0)
        lines.append({"step": step, "at": now, "loss": 0.0})
    return [*lines, {"training_s": now, "saving_s": 0.25 * (steps // EVERY - 1)}]


def test_what_a_save_loses_is_the_difference_of_the_steps_with_and_without() -> None:
    found = figures_of(told(steps=4 * EVERY, first_s=9.0, save_s=0.5), [{"restoring_s": 0.75}])
    assert found.step_s == pytest.approx(1.0)
    assert found.lost_s == pytest.approx(0.5)
    assert (found.thread_s, found.restore_s) == (0.25, 0.75)


def test_without_saves_nothing_is_lost_or_restored() -> None:
    found = figures_of(told(steps=3 * EVERY, first_s=0.0, save_s=0.0), [])
    assert (found.lost_s, found.restore_s) == (pytest.approx(0.0), None)
