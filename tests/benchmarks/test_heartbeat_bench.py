"""The benchmark of heartbeats runs, whatever the hooks of the callback look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import heartbeat


def test_each_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat.main(["--batches", "50", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert len(rows) == 5 and all(0 < row["median_s"] <= row["p99_s"] <= row["most_s"] for row in rows.values())
    assert all(row["batches"] == 50 for row in rows.values()) and "callback, a folder" in capsys.readouterr().out
