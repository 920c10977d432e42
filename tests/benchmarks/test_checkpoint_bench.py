"""The benchmark measures what it says: the harness runs end to end at tiny sizes, and its sums are right."""

from __future__ import annotations

import json
import os
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint
from benchmarks._contenders import LOOP
from benchmarks._process import run_contender
from benchmarks._state import digest, make_state, mutate, wipe
from benchmarks._summary import summarize_isolated, summarize_loop
from benchmarks._targets import isolated_targets

FIGURES = ("setup_s", "first_stall_s", "beside_stall_s", "stall_s", "committed_s", "restore_s", "ram_x_state")


def one_round(**changes: object) -> dict[str, object]:
    save = {"call_s": 0.1, "stall_s": 0.2, "committed_s": 0.3, "durable_s": 0.4}
    beside = {"call_s": 0.1, "fence_s": 0.0, "stall_s": 0.1, "compute_ratio": 0.9, "in_flight_s": 1.0}
    result = {
        "bytes": 10,
        "flush": "own fsync",
        "setup_s": 1.0,
        "first": {**save, "stall_s": 0.6},
        "warm": [save, save],
        "overlapped": [beside],
        "ram_x_state": 2.0,
        "restore_s": [0.5],
    }
    return {**result, **changes}


# ---- the harness, end to end


def measure(folder: Path, *names: str) -> tuple[int, dict[str, Any]]:
    """The status, and what the JSON says, of a run with these contenders."""
    target = folder / "result.json"
    words = "--quick --part isolated --sizes 4x4 --saves 1 --threads 1".split()
    code = checkpoint.main([*words, "--dir", str(folder), "--json", str(target), "--only", *names])
    return code, json.loads(target.read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    "only",
    [
        ["torch-save"],
        pytest.param(["torch-save", "dcp-sync", "bound-digest", "bound-file", "ours-lazy"], marks=pytest.mark.nightly),
    ],
    ids=len,
)
def test_table_and_json_are_complete(only: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = measure(tmp_path, *only)
    printed = capsys.readouterr().out
    rows = {row["contender"]: row for row in found["rows"]}
    assert set(rows) == {"floor-copy", "floor-write", *only}
    assert {name: row.get("reason", "") for name, row in rows.items() if row["status"] != "ok"} == {}
    assert code == 0
    for name, row in rows.items():
        assert row["bytes"] == 4 * 2**20
        assert all(row[key] is not None and row[key] >= 0 for key in FIGURES), row
        assert (row["durable_s"] is None) == (name in ("floor-copy", "bound-digest"))
        assert row["label"] in printed
    assert rows["torch-save"]["flush"] == "fsync by us"
    assert rows["floor-copy"]["ram_x_state"] > 0.9, "the shared copy of the floor was not seen by the sampler"
    measured = [target["measured"] for target in found["targets"]]
    assert len(measured) == (7 if "ours-lazy" in only else 0) and None not in measured
    assert ("Targets" in printed) == bool(measured) and "not measured" not in printed
    assert found["machine"]["cores"] >= 1 and found["machine"]["filesystem"] in printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"], "scratch files were left behind"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ours", "fsdp2-ours-lazy"])
def test_loop_runs_under_torchrun(name: str, tmp_path: Path) -> None:
    spec = {"mebibytes": 1, "width": 64, "batch": 2, "segment": 2, "saves": 1, "ranks": 2, "threads": 1}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks._loop"]
    entry = next(entry for entry in LOOP if entry.name == name)
    given = {**spec, "module": entry.module, "attribute": entry.attribute, "strategy": entry.strategy}
    result = run_contender(launcher, given, folder=tmp_path, deadline=timedelta(seconds=150))
    row = summarize_loop([result], segment=2)
    assert row["status"] == "ok", row
    assert row["saves"] == 1 and row["step_s"] > 0 and row["lost_s"] is not None
    assert (row["restore_s"] is not None) == (entry.strategy == "fsdp2")
    assert result["disk_bytes"] >= result["state_bytes"], "the loop did not leave a whole checkpoint"
    assert result["missed"] == 0 and result["logged"] > 0, "the event log was not found, or a save was skipped"


# ---- processes


def run_script(tmp_path: Path, body: str, *, seconds: float = 60) -> dict[str, object]:
    (tmp_path / "contender_for_test.py").write_text(textwrap.dedent(body))
    path = os.pathsep.join([str(tmp_path), str(Path(checkpoint.__file__).parent.parent)])
    return run_contender(
        ["contender_for_test"], {}, folder=tmp_path, deadline=timedelta(seconds=seconds), env={"PYTHONPATH": path}
    )


def test_a_contender_that_hangs_is_killed_with_its_daemon(tmp_path: Path) -> None:
    daemon = tmp_path / "daemon.txt"
    start = time.monotonic()
    result = run_script(
        tmp_path,
        f"""
        import signal, subprocess, sys, threading
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
        open({str(daemon)!r}, "w").write(str(child.pid))
        threading.Event().wait()
        """,
        seconds=3,
    )
    assert "ran past its deadline of 3 s" in str(result["error"])
    assert time.monotonic() - start < 20
    pid = int(daemon.read_text())
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "zombie" in status.read_text(), f"the daemon {pid} of the contender still lives"


def test_a_contender_that_dies_says_why(tmp_path: Path) -> None:
    result = run_script(tmp_path, "raise ValueError('no such tensor')")
    assert result == {"error": "ended with code 1; last error: ValueError: no such tensor"}


def test_a_missing_package_is_unavailable_not_failed(tmp_path: Path) -> None:
    spec = {"module": "no_such_peer", "attribute": "Peer", "mebibytes": 1, "tensors": 1, "threads": 1}
    result = run_contender(["benchmarks._isolated"], spec, folder=tmp_path, deadline=timedelta(seconds=100))
    assert result == {"unavailable": "does not import: No module named 'no_such_peer'"}
    assert summarize_isolated([result])["status"] == "unavailable"


# ---- the state


def test_state_has_the_size_asked_for_and_its_digest_sees_changes() -> None:
    state = make_state(mebibytes=2, tensors=3)
    assert len(state) == 3 and 0 <= 2 * 2**20 - sum(tensor.nbytes for tensor in state.values()) < 16
    before = digest(state)
    mutate(state)
    changed = digest(state)
    assert all(before[name] != changed[name] for name in state)
    state["layers.1.weight"][5] += 1
    assert [name for name in state if digest(state)[name] != changed[name]] == ["layers.1.weight"]
    wipe(state)
    assert all(not torch.any(tensor) for tensor in state.values())


# ---- sums


def test_isolated_row_is_the_median_over_rounds() -> None:
    save = {"call_s": 0.1, "stall_s": 0.9, "committed_s": 0.9, "durable_s": None}
    row = summarize_isolated([one_round(), one_round(warm=[save, save, save], setup_s=3.0), {"error": "lost"}])
    assert row["stall_s"] == 0.9 and row["durable_s"] == 0.4 and row["setup_s"] == 2.0
    assert row["status"] == "ok" and row["failed_rounds"] == 1 and row["reason"] == "lost"
    assert summarize_isolated([{"error": "lost"}])["status"] == "failed"
    assert summarize_isolated([])["status"] == "failed"


def test_loop_row_finds_the_cost_of_each_save() -> None:
    every = 6
    steps = [1.0] * (every - 1)  # before the first save
    steps += [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]  # the first save
    for stall in (0.5, 50.0, 0.55, 0.6, 0.4, 0.65, 0.7, 0.75):  # one hiccup of the machine among them
        steps += [1.0 + stall, 1.1, 1.0, 1.0, 1.0, 1.0]
    row = summarize_loop([{"step_s": steps, "every": every, "state_bytes": 8}], segment=3)
    assert row["first_lost_s"] == pytest.approx(8.0)
    assert row["lost_s"] == pytest.approx(0.725) and row["at_save_s"] == pytest.approx(0.625)
    assert row["saves"] == 8 and row["step_s"] == 1.0
    assert 0.5 <= row["lost_low_s"] < 0.725 < row["lost_high_s"] < 50
    assert row["lost_mean_s"] == pytest.approx(0.1 + 54.15 / 8)


def test_targets_are_ratios_of_the_rows() -> None:
    floor = summarize_isolated([one_round()])
    own = {
        **floor,
        "beside_stall_s": 0.019,
        "stall_s": 0.21,
        "first_stall_s": 0.4,
        "restore_s": 0.1,
        "ram_x_state": 2.4,
    }
    rows = {"floor-copy": floor, "floor-write": floor, "dcp-sync": floor, "ours-lazy": own}
    by_text = {target.text.split(":")[0].split(" /")[0]: target for target in isolated_targets(rows, where="here")}
    met = {text: target.met for text, target in by_text.items()}
    assert met == {
        "safe warm stall beside compute": True,  # 0.019 of 0.2
        "safe warm stall with nothing beside": False,  # 0.21 of 0.2
        "first save": False,  # 0.4 of 0.21
        "committed": False,  # 0.3 of 0.2
        "durable": True,  # 0.4 of 0.4
        "restore": True,  # 0.5 of 0.1
        "peak RAM above the state, in shards (2 + 15 %)": False,
    }
    del rows["floor-copy"]
    missing = next(iter(isolated_targets(rows, where="here")))
    assert missing.measured is None and missing.met is None


# ---- names
