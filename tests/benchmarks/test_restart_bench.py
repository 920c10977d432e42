"""The restart benchmark reads its jobs' marks right, and its table has a row for each launcher and number of ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import restart
from benchmarks._host_death import HostDeath, host_table


def test_marks_of_attempts_are_read_and_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "marks-0").write_text("pid 0 41 0\nstep 0 1 10.5\nstep 0 2 10.7\npid 1 43 0\nstep 1 2 12.0\nstep 1 3")
    first, second = restart.Marks(tmp_path, 2).read()
    assert second == {}
    assert first == {0: {"pid": [41.0], "step": [10.5, 10.7]}, 1: {"pid": [43.0], "step": [12.0]}}
    assert restart._steps_of([first, first], 0) == 2 and restart._steps_of([first, second], 0) == 0
    assert restart._has_stepped(first, 0) and not restart._has_stepped(first, 1)


def test_the_table_shows_the_median_of_the_kills_and_its_parts() -> None:
    marks = [dict(zip(restart.PARTS, [0.1 * n, 0.2 * n, 0.3 * n, 0.6 * n, n], strict=True)) for n in (1.0, 2.0, 9.0)]
    kills = [restart.Recovery(launcher="a", ranks=2, total_s=one["step"], marks=one) for one in marks]
    kills.append(restart.Recovery(launcher="b", ranks=4, total_s=1.0, marks=marks[0]))
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(restart.table(kills))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines() if "│" in line
    ]
    assert rows[0] == ["a", "2", "3", "2.00", "9.00", "0.20", "0.20", "0.20", "0.60", "0.80"]
    assert rows[1][:5] == ["b", "4", "1", "1.00", "1.00"]


@pytest.mark.parametrize(("totals", "verdict"), [((2.5, 3.0, 3.9), "2, met"), ((2.5, 4.1), "2, missed")])
def test_the_death_of_a_host_is_counted_from_the_end_of_the_timeout(totals: tuple[float, ...], verdict: str) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(host_table([HostDeath(timeout_s=2.0, total_s=total) for total in totals]))
    (row,) = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    assert [cell.strip() for cell in row][-2:] == [f"{max(totals) - 2:.2f}", verdict]
