"""The scale benchmark runs end to end at four ranks, and both ways agree on the same messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scale


@pytest.mark.nightly
def test_a_small_run_prints_a_row_for_each_world_and_message(tmp_path: Path) -> None:
    target = tmp_path / "scale.json"
    options = "--ranks 2 4 --bytes 64 --rounds 2 --old-up-to 4 --processes 2 --plan-ranks 2 8 --tensors 20 --rank-mib 1 --json"
    command = [sys.executable, "-m", "benchmarks.scale", *options.split(), str(target)]
    root = Path(scale.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, plans, restores = (json.loads(target.read_text())[name] for name in ("rows", "plans", "restores"))
    assert [row["what"] for row in restores] == ["2 to 2", "2 to 2, folders lost", "2 to 4", "4 to 2"]
    assert all(row["read_nbytes"] > row["wanted_nbytes"] and row["open_files"] < 256 for row in restores)
    sent = {(row["what"], row["ranks"]): (row["first_messages"], row["later_messages"]) for row in plans}
    # Of a write plan each other rank sends rank 0 a digest, and the first time its boxes; both are answered.
    assert sent == {
        ("DTensors", 2): (0, 0),
        ("DTensors", 8): (0, 0),
        ("WritePlan", 2): (4, 2),
        ("WritePlan", 8): (28, 14),
    }
    assert [(row["way"], row["ranks"]) for row in rows] == [
        (way, ranks) for ranks in (2, 4) for way in ("append", "key of each")
    ]
    assert all(row["seconds"] > 0 for row in rows)
    ours, old = rows[2:]
    assert (old["rank_calls"], old["store_calls"]) == (1 + 2 * 4, 4 * (1 + 2 * 4))
    assert ours["store_calls"] == 4 * 4 + 1.5, "each appends, counts, waits, gets; the last sets instead, and deletes"
    assert ours["keys_left"] <= 3
    assert "given 64 (64 B)" in done.stdout
