"""The script for a machine with one GPU works, as far as a machine without a GPU can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu


def test_every_part_runs_without_a_gpu_when_asked_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--mib", "8", "--dir", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")],
        cwd=Path(gpu.__file__).resolve().parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    judged = {row["part"]: row["good"] for row in rows if row["good"] is not None}
    assert judged == {"restore": True, "FSDP2": True, "Lightning": True}
    assert {row["part"] for row in rows} == {"copy", "compute", "restore", "FSDP2", "Lightning", "tests"}
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]


def test_a_part_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(bench: gpu.Bench) -> Iterator[gpu.Row]:
        yield gpu.Row(part="first", what="before", value="1")
        raise RuntimeError("no such engine\nsecond line")

    def works(bench: gpu.Bench) -> Iterator[gpu.Row]:
        yield gpu.Row(part="second", what="after", value="2")

    monkeypatch.setattr(gpu, "PARTS", {"first": breaks, "second": works})
    rows = list(gpu.measure("cpu", 1, tmp_path))
    assert [(row.part, row.value, row.good) for row in rows] == [
        ("first", "1", None),
        ("first", "RuntimeError: no such engine", False),
        ("second", "2", None),
    ]


def test_without_cuda_it_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err
