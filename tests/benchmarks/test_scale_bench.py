"""The scale benchmark runs end to end at four ranks, and both ways agree on the same messages."""

from __future__ import annotations

import json
from pathlib import Path

from resiliency.testing.zygote import Zygote
from tests.zygote import start_script

#: The processes of the ranks and of the store are forks.
SCALE = """
import sys
from benchmarks import scale
from tests.launch.forked_spawns import fork_spawned
if __name__ == "__main__":
    fork_spawned()
    sys.exit(scale.main(sys.argv[1:]))
"""


def test_a_small_run_prints_a_row_for_each_world_and_message(tmp_path: Path, zygote: Zygote) -> None:
    target, output = tmp_path / "scale.json", tmp_path / "output"
    arguments = "--ranks 2 4 --bytes 64 --rounds 2 --old-up-to 4 --processes 2 --json".split()
    worker = start_script(zygote, SCALE, output, *arguments, str(target))
    try:
        assert worker.wait(timeout_s=120) == 0, output.read_text()
    finally:
        worker.kill()
    rows = json.loads(target.read_text())["rows"]
    assert [(row["way"], row["ranks"]) for row in rows] == [
        (way, ranks) for ranks in (2, 4) for way in ("append", "key of each")
    ]
    assert all(row["seconds"] > 0 for row in rows)
    ours, old = rows[2:]
    assert (old["rank_calls"], old["store_calls"]) == (1 + 2 * 4, 4 * (1 + 2 * 4))
    assert ours["store_calls"] == 4 * 4 + 1.5, "each appends, counts, waits, gets; the last sets instead, and deletes"
    assert ours["keys_left"] <= 3
    assert "given 64 (64 B)" in output.read_text()
