"""The older library's calculator and tracker: same command line, same figures, same log format."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.goodput_measure import calculator, tracker
from resiliency.goodput_measure.calculator import GoodputCalculator

ROOT = Path(__file__).parents[2]


def older_log(path: Path) -> Path:
    """In the older library's format: naive stamps, keys in any order, whole floats, no rank on checkpoint events."""
    lines = [
        {"node_rank": 0.0, "event_type": "job_started", "job_name": "job-a", "timestamp": "2025-04-02T06:00:00.000000"},
        {"node_rank": 1.0, "timestamp": "2025-04-02T06:00:04.250000", "job_name": "job-a", "event_type": "job_started"},
        {"job_name": "job-b", "event_type": "checkpoint_saved", "timestamp": "2025-04-02T06:00:30", "step": 999.0},
        {"job_name": "job-a", "event_type": "checkpoint_loaded", "timestamp": "2025-04-02T06:01:40", "step": 40.0},
        {"job_name": "job-a", "event_type": "checkpoint_saved", "timestamp": "2025-04-02T06:06:40", "step": 60.0},
        {"job_name": "job-a", "event_type": "checkpoint_saved", "timestamp": "2025-04-02T06:11:40", "step": 80.0},
        {"node_rank": 0.0, "event_type": "job_terminated", "job_name": "job-a", "timestamp": "2025-04-02T06:16:40"},
        {"node_rank": 1.0, "event_type": "job_terminated", "job_name": "job-a", "timestamp": "2025-04-02T06:16:40"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"job_name": "job-a", "eve')
    return path


def test_the_older_log_gives_the_older_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = GoodputCalculator("job-a", str(older_log(tmp_path / "event_log.log")), verbose=True)
    events = tool.preprocess_events(tool.load_events(), "job-a")
    metrics = tool.calculate_goodput(events, 12.5)
    assert metrics["total_runtime_seconds"] == 1000
    assert (metrics["min_loaded_step"], metrics["max_saved_step"], metrics["step_diff"]) == (40, 80, 40)
    assert metrics["goodput_percentage"] == pytest.approx(50.0)
    assert metrics["job_started_count"] == 1
    assert metrics["checkpoints_loaded"] == 1
    assert metrics["checkpoints_saved"] == 2
    assert "Lines that could not be parsed: 1\n" in capsys.readouterr().out


def test_without_a_reference_there_is_no_percentage(tmp_path: Path) -> None:
    tool = GoodputCalculator("job-a", str(older_log(tmp_path / "event_log.log")))
    metrics = tool.calculate_goodput(tool.preprocess_events(tool.load_events(), "job-a"))
    assert metrics["goodput_percentage"] == 0
    assert GoodputCalculator("nobody", "x").calculate_goodput([])["error"] == "No events found"


def run_module(module: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_the_calculators_command_line_prints_and_exports_the_figures(tmp_path: Path) -> None:
    log = older_log(tmp_path / "event_log.log")
    result = run_module(
        "resiliency.goodput_measure.calculator",
        "--job-name",
        "job-a",
        "--log-file",
        str(log),
        "--export",
        "out.json",
        "--reference-step-time",
        "12.5",
        "--gcloud-logging-lookback-days",
        "7.0",
        "--verbose",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "50.00%" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["goodput_percentage"] == pytest.approx(50.0)


@pytest.mark.parametrize("form", ["rotated", "array", "latin-1", "twice"])
def test_the_calculator_reads_what_the_report_reads(form: str, tmp_path: Path) -> None:
    lines = older_log(tmp_path / "event_log.log").read_text().splitlines()[:-1]
    (tmp_path / "event_log.log").unlink()
    if form == "rotated":
        (tmp_path / "event_log.log.1.gz").write_bytes(gzip.compress("\n".join(lines[:4]).encode()))
        (tmp_path / "event_log.log").write_text("\n".join(lines[4:]))
    elif form == "array":
        entries = [{"jsonPayload": json.loads(line), "insertId": "x"} for line in lines]
        (tmp_path / "export.json").write_text(json.dumps(entries))
    elif form == "latin-1":
        (tmp_path / "event_log.log").write_bytes("\n".join(lines).replace("job-b", "jöb").encode("latin-1"))
    else:
        for name in ("event_log.log", "copy.log"):
            (tmp_path / name).write_text("\n".join(lines))
    tool = GoodputCalculator("job-a", str(tmp_path))
    events = tool.load_events()
    assert len(events) == 8
    metrics = tool.calculate_goodput(tool.preprocess_events(events, "job-a"), 12.5)
    assert metrics["goodput_percentage"] == pytest.approx(50.0)
    assert (metrics["checkpoints_loaded"], metrics["checkpoints_saved"]) == (1, 2)


def test_a_calculator_whose_reader_has_seen_enough_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(text: str) -> int:
        raise BrokenPipeError

    log = older_log(tmp_path / "event_log.log")
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", closed)
        assert calculator.main(["--job-name", "job-a", "--log-file", str(log)]) == 1
    assert capsys.readouterr().err == ""


def test_the_calculator_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calculator.main(["--job-name", "x", "--log-file", str(tmp_path / "none.log")]) == 1
    assert "Log file not found" in capsys.readouterr().err


def test_the_tracker_writes_the_older_file(tmp_path: Path) -> None:
    variables = {"JOB_IDENTIFIER": "job-a", "GOODPUT_USE_FILE_TRACKING": "1"}
    for kind in ("user_scheduled", "user_terminated"):
        result = run_module("resiliency.goodput_measure.tracker", "--event-type", kind, cwd=tmp_path, **variables)
        assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "job-a-goodput.log").read_text().splitlines()]
    assert [line["event_type"] for line in lines] == ["user_scheduled", "user_terminated"]
    assert all(line["job_name"] == "job-a" and line["timestamp"].endswith("+00:00") for line in lines)
    bad = run_module("resiliency.goodput_measure.tracker", "--event-type", "job_started", cwd=tmp_path, **variables)
    assert bad.returncode == 2


def test_the_older_logger_class_works_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOODPUT_USE_FILE_TRACKING", "")
    monkeypatch.delenv("JOB_IDENTIFIER", raising=False)
    monkeypatch.setattr(tracker, "boot_seconds", lambda: 1234.5)
    logger = tracker.GoodputLogger(tmp_path)
    logger.log_event("checkpoint_saved", step=7)
    logger.log_event("job_started", node_rank=3)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "training-job-goodput.log").read_text().splitlines()]
    assert lines[0]["step"] == 7
    assert lines[0]["monotonic_s"] == 1234.5, "the clock of all other events of the host"
    assert (lines[1]["node_rank"], lines[1]["rank"]) == (3, -1)
    blocked = tmp_path / "file"
    blocked.write_text("")
    tracker.GoodputLogger(blocked / "below").log_event("checkpoint_saved", step=1)


def test_without_the_cloud_library_the_tracker_falls_back_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GOODPUT_USE_FILE_TRACKING", raising=False)
    monkeypatch.setattr(tracker, "cloud_logging_available", lambda: False)
    logger = tracker.GoodputLogger(tmp_path)
    logger.log_event("user_scheduled")
    logger.close()
    assert (tmp_path / "training-job-goodput.log").exists()
    assert "goodput events go to" in caplog.text


def test_the_older_librarys_logger_writes_where_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logging, constant = (
        importlib.import_module(f"resiliency.goodput_measure.{name}") for name in ("logging", "constant")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOODPUT_USE_FILE_TRACKING", "1")
    monkeypatch.setenv("JOB_IDENTIFIER", "older")
    tracker._logger.cache_clear()
    logging.log_event(constant.CHECKPOINT_SAVED, step=4)
    tracker._logger.cache_clear()
    (line,) = (tmp_path / "older-goodput.log").read_text().splitlines()
    assert (json.loads(line)["event_type"], json.loads(line)["step"]) == ("checkpoint_saved", 4)
