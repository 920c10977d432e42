"""The comparison of checkpoint frequency and goodput: its figures, and one short run of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmark import compare, measure
from recipes.benchmark.figures import Measured, best_of, rows_of, table_of


def one(writer: str, interval: int, wall_s: float, saves: int) -> Measured:
    return Measured(writer=writer, interval=interval, steps=10, wall_s=wall_s, saves=saves)


RUNS = [
    one("none", 0, 9.0, 0),
    one("stock", 5, 20.0, 2),
    one("resiliency", 5, 10.5, 2),
    one("resiliency", 1, 12.5, 10),
    one("none", 0, 11.0, 0),
]


def test_figures() -> None:
    rows = {(row.writer, row.interval): row for row in rows_of(RUNS, mtbf_s=100.0, restart_s=5.0)}
    assert list(rows) == [("resiliency", 1), ("resiliency", 5), ("stock", 5)]
    stock, ours = rows["stock", 5], rows["resiliency", 5]
    assert (stock.step_s, stock.lost_per_save_s, stock.goodput) == pytest.approx((2.0, 5.0, 0.5))
    assert ours.lost_per_save_s == pytest.approx(0.25)
    # A failure costs 5 s and half of five steps of two seconds.
    assert stock.goodput_with_failures == pytest.approx(0.5 * (1 - 10 / 100))
    assert rows["resiliency", 1].goodput_with_failures == pytest.approx(0.8 * (1 - (5 + 0.625) / 100))
    never = rows_of(RUNS, mtbf_s=1.0, restart_s=5.0)
    assert {row.goodput_with_failures for row in never} == {0.0}
    with pytest.raises(ValueError, match="without saves"):
        rows_of(RUNS[1:2], mtbf_s=1.0, restart_s=1.0)


def test_the_fastest_round_counts() -> None:
    slow, fast = one("stock", 5, 20.0, 2), one("stock", 5, 11.0, 2)
    assert best_of([slow, fast, one("stock", 1, 30.0, 2)]) == [fast, one("stock", 1, 30.0, 2)]
    assert best_of([fast, slow]) == [fast]


def test_table() -> None:
    text = table_of(rows_of(RUNS, mtbf_s=100.0, restart_s=5.0), mtbf_s=100.0, restart_s=5.0)
    lines = text.splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert "with a failure every 100 s" in lines[0] and "5000 ms" in lines[3] and "50.0%" in lines[3]
    assert "Best: a save every 5 steps by resiliency" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--intervals", "0"], "1 or more"),
        (["--intervals", "99", "--steps", "9"], "nothing would be saved"),
        (["--writers", "other"], "invalid choice"),
        (["--mtbf", "0"], "1 or more"),
        (["--rounds", "0"], "1 or more"),
        (["--dir", "/nowhere"], "--dir /nowhere is no folder"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_a_run_trains_with_and_without_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: dict[tuple[str, int], int] = {}
    trained: list[tuple[str, int]] = []
    real = compare.measure

    def watched(writer: str, interval: int, **settings: Any) -> Measured:
        assert settings["folder"].startswith(str(tmp_path))
        found = real(writer, interval, **settings)
        trained.append((writer, interval))
        left[writer, interval] = len(list(Path(settings["folder"]).glob("*.ckpt")))
        return found

    monkeypatch.setattr(compare, "measure", watched)
    flags = ["--model", "tiny", "--steps", "6", "--warm-up", "2", "--intervals", "2", "3", "--dir", str(tmp_path)]
    assert compare.main([*flags, "--mtbf", "60", "--restart", "1", "--rounds", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["model"], said["steps"], said["mtbf_s"], said["restart_s"]) == ("tiny", 6, 60.0, 1.0)
    assert [(row["interval"], row["writer"], row["saves"]) for row in said["rows"]] == [
        (2, "resiliency", 3),
        (2, "stock", 3),
        (3, "resiliency", 2),
        (3, "stock", 2),
    ]
    for row in said["rows"]:
        lost_s = 1 + row["interval"] / 2 * row["step_s"]
        assert row["goodput_with_failures"] == pytest.approx(row["goodput"] * (1 - lost_s / 60))
    assert {each: trained.count(each) for each in trained} == dict.fromkeys(left, 2)
    assert left == {("none", 0): 0, **{(writer, every): 2 for writer in measure.WRITERS for every in (2, 3)}}
    assert list(tmp_path.iterdir()) == []
